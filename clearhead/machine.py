"""The device and the precision of this machine that "auto" selects."""

from __future__ import annotations

import os
from typing import Final, Literal

import torch

from clearhead.errors import InputError

MOST_THREADS: Final = 4
"""For each processor; so many threads only wait for each other."""


def choose_device(name: str) -> torch.device:
    """Return the device of a name; "auto" is the first available one of cuda, mps and cpu.

    Raises:
        InputError: the name is not a device, or this machine does not have it.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"'{name}' is not a device: use auto, cpu, cuda, cuda:N or mps") from None
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(device.type, 1)
    if (device.index or 0) >= count:
        raise InputError(f"there is no device '{name}' on this machine: use auto or cpu")
    return device


def too_many_threads(threads: int) -> str | None:
    """Return what is wrong with a number of CPU threads that only wait for each other; None: nothing."""
    processors = os.cpu_count() or 1
    if threads <= MOST_THREADS * processors:
        return None
    return (
        f"{threads} is far more than the {processors} processors of this machine; give at most "
        f"{MOST_THREADS * processors}"
    )


def has_fast_bf16(device: torch.device) -> bool:
    """Return whether matrix products in bfloat16 are faster than in float32 on a device."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and any((torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_bf16_supported()))


def choose_precision(name: str, device: torch.device) -> Literal["fp32", "bf16"]:
    """Return the precision of a name; "auto" is bf16 on CUDA devices that support it.

    Raises:
        InputError: the name is not a precision.
    """
    if name == "auto":
        return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if name == "fp32":
        return "fp32"
    if name == "bf16":
        return "bf16"
    raise InputError(f"precision must be auto, fp32 or bf16; got '{name}'")
