"""Bounds on the kernels that are kept: oneDNN makes one for each shape of a product, in bf16 and where it does fp32.

A kernel takes almost a megabyte. oneDNN keeps the last 1,024 of them, and so does torch in a cache of its own, which
holds on to those that oneDNN drops. What is dropped leaves holes in memory, which malloc keeps unless told not to.
"""

from __future__ import annotations

import os
from typing import Final

import torch

from clearhead.base.machine import give_memory_back
from clearhead.fast.training.float_linear import has_faster_products

CAPACITY: Final = 512
"""So many kernels are kept: with fewer, those of a translation's batches are made again and again."""
OWN_CAPACITY: Final = 16
"""So many are kept by torch beside them."""
STEPS_BETWEEN: Final = 25
_BOUNDS: Final = {
    ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"): CAPACITY,
    ("LRU_CACHE_CAPACITY",): OWN_CAPACITY,
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
