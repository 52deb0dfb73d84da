"""Memory of a training process: its use and peak, and limits on cached oneDNN kernels.

oneDNN compiles a kernel for each shape of a product in bf16, and in fp32 if oneDNN computes it. A kernel takes almost a
megabyte. oneDNN caches the last 1,024 kernels, and torch has a second cache with kernels that oneDNN has dropped. A
dropped kernel leaves a hole in memory, which malloc returns only on request.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import torch
from torch import Tensor

from clearhead.base.machine import give_memory_back
from clearhead.fast.training.float_linear import has_faster_products

CAPACITY: Final = 512
"""Maximum number of kernels that oneDNN caches; with fewer, the kernels of a translation run are recompiled often."""
TORCH_CAPACITY: Final = 16
"""Maximum number of kernels in torch's own cache."""
STEPS_BETWEEN: Final = 25
_BOUNDS: Final = {
    ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"): CAPACITY,
    ("LRU_CACHE_CAPACITY",): TORCH_CAPACITY,
}


def limit_kernel_cache() -> None:
    """Limit the cached oneDNN kernels by variables that the user has not set; call before the first matrix product."""
    for names, capacity in _BOUNDS.items():
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = str(capacity)


def return_memory(step: int, device: torch.device, precision: str) -> None:
    """Give the memory of dropped oneDNN kernels back to the system, every `STEPS_BETWEEN` steps; needs glibc.

    Args:
        step: the training step.
        device, precision: the device and the precision of the matrix products.
    """
    if step % STEPS_BETWEEN == 0 and needs_kernels(device, precision):
        give_memory_back()


@contextlib.contextmanager
def freeze_objects(device: torch.device) -> Iterator[None]:
    """Return a context manager in which garbage collections pass over all present objects, if a run trains on CUDA.

    A collection of all objects takes tenths of a second, in which a GPU would run out of work.

    Args:
        device: the device of the run.
    """
    if device.type != "cuda":
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def needs_kernels(device: torch.device, precision: str) -> bool:
    """Return whether oneDNN compiles and caches kernels for each shape of a batch, which takes memory."""
    return device.type == "cpu" and (precision == "bf16" or has_faster_products())


def memory_in_use(device: torch.device) -> int:
    """Return the memory use of this process in bytes: of the GPU on CUDA, else of main memory."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def start_peak(device: torch.device) -> int:
    """Reset the peak of the memory use, and return the current use in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    gc.collect()  # garbage freed during the step would hide the same amount of its memory
    with contextlib.suppress(OSError):
        # Linux: resets the peak of this process
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_memory(device)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory use in bytes; the current use if the system reports no peak."""
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
    """Return the size of a tensor in this process in bytes; for a sharded tensor, the size of the local shard."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.nbytes
