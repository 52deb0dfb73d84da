"""Memory of a training process: its use and its peak, and bounds on the kernels that stay in memory.

oneDNN makes a kernel for each shape of a product in bf16, and in fp32 where oneDNN computes it. A kernel takes almost a
megabyte. oneDNN keeps the last 1,024 of them, and torch has a second cache, which holds kernels that oneDNN drops. A
dropped kernel leaves a hole in memory, which malloc keeps unless it is asked to return it.
"""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from typing import Final

import psutil
import torch
from torch import Tensor

from clearhead.base.machine import give_memory_back
from clearhead.fast.training.float_linear import has_faster_products

CAPACITY: Final = 512
"""So many kernels are kept: with fewer, those of a translation's batches are made again and again."""
TORCH_CAPACITY: Final = 16
"""So many are kept by torch beside them."""
STEPS_BETWEEN: Final = 25
_BOUNDS: Final = {
    ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"): CAPACITY,
    ("LRU_CACHE_CAPACITY",): TORCH_CAPACITY,
}


def limit_kernel_cache() -> None:
    """Bound the number of kernels that are kept, unless the user's environment does; before the first product."""
    for names, capacity in _BOUNDS.items():
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = str(capacity)


def return_memory(step: int, device: torch.device, precision: str) -> None:
    """Give what dropped kernels left back to the system, once in some steps; only glibc can.

    Args:
        step: of training.
        device, precision: of its products.
    """
    if step % STEPS_BETWEEN == 0 and needs_kernels(device, precision):
        give_memory_back()


def needs_kernels(device: torch.device, precision: str) -> bool:
    """Return whether every shape of a batch needs kernels of its own, which take memory for the whole run."""
    return device.type == "cpu" and (precision == "bf16" or has_faster_products())


def memory_in_use(device: torch.device) -> int:
    """Return the bytes that this process holds: of the accelerator where there is one, else of main memory."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def start_peak(device: torch.device) -> int:
    """Reset the peak of the memory in use, and return the present use in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    gc.collect()  # garbage that is freed during the step would hide as much of its memory
    with contextlib.suppress(OSError):
        # Linux: resets the peak of this process
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_memory(device)


def peak_memory(device: torch.device) -> int:
    """Return the peak of the memory in use; the present use where the system reports no peak."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    with contextlib.suppress(OSError, IndexError, ValueError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    memory = psutil.Process().memory_info()
    return int(getattr(memory, "peak_wset", memory.rss))


def size_of(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes on this process: those of its own shard, where it is sharded."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.nbytes
