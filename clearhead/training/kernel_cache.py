"""A bound on the kernels that oneDNN keeps: on CPUs with matrix units it makes one for each shape of a 16-bit product.

A kernel takes almost a megabyte, and torch keeps the last 1,024 of them.
"""

from __future__ import annotations

import os
from typing import Final

import torch

CAPACITY: Final = 512
"""So many kernels are kept: with fewer, those of a translation's batches are made again and again."""
KERNEL_BYTES: Final = 900_000
"""What a kernel takes on average."""
_NAMES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"


def limit_kernel_cache() -> None:
    """Bound the number of kernels that are kept, unless the user's environment does; before the first product."""
    if not any(name in os.environ for name in _NAMES):
        os.environ[_NAMES[0]] = str(CAPACITY)


def most_kernel_bytes(device: torch.device, precision: str) -> int:
    """Return the bytes of a full cache, 0 where no kernels are made for a shape."""
    if device.type != "cpu" or precision != "bf16":
        return 0
    capacity = next((os.environ[name] for name in _NAMES if name in os.environ), "1024")
    return KERNEL_BYTES * int(capacity) if capacity.isdecimal() else 0
