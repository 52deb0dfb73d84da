"""A bound on the kernels that oneDNN keeps: on CPUs with matrix units it makes one for each shape of a 16-bit product.

A kernel takes almost a megabyte, and torch keeps the last 1,024 of them. Half of that memory is never given back, so it
is the number of shapes that bounds the rest (`data/batches/shapes.py`).
"""

from __future__ import annotations

import os
from typing import Final

import torch

CAPACITY: Final = 512
"""So many kernels are kept: with fewer, those of a translation's batches are made again and again."""
_NAMES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"


def limit_kernel_cache() -> None:
    """Bound the number of kernels that are kept, unless the user's environment does; before the first product."""
    if not any(name in os.environ for name in _NAMES):
        os.environ[_NAMES[0]] = str(CAPACITY)


def needs_kernels(device: torch.device, precision: str) -> bool:
    """Return whether every shape of a batch needs kernels of its own, which take memory for the whole run."""
    return device.type == "cpu" and precision == "bf16"
