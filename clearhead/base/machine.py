"""What this machine has: the device and the precision that "auto" selects, and memory."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import psutil
import torch

from clearhead.base.arguments import unknown_device_error
from clearhead.base.errors import InputError, LackOfMemory
from clearhead.base.printing import human_bytes

SAFE_PATH: Final = {"PYTHONSAFEPATH": "1"}
"""Environment of a child process that finds no modules in the working directory, such as a user's random.py."""
DEVICE_CHECK: Final = "CLEARHEAD_DEVICE_CHECK"
MOST_THREADS: Final = 4
"""For each processor; so many threads only wait for each other."""

# Of mallopt; a block of more bytes than the last one is always given back.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_LARGEST_KEPT: Final = 32 << 20

_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN_GROUPS: Final = Path("/proc/self/cgroup")
_LOGGER: Final = logging.getLogger("clearhead.base.machine")


def give_memory_back() -> None:
    """Give freed memory that the C library keeps back to the system; only glibc can."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for what comes next, which is not cleared again then; only glibc can.

    Without it a step of training may get its larger tensors from the system. What the environment says has priority.
    """
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        with contextlib.suppress(OSError, AttributeError, TypeError):
            for setting, size in ((_TRIM_THRESHOLD, 2**31 - 1), (_MMAP_THRESHOLD, _LARGEST_KEPT)):
                ctypes.CDLL(None).mallopt(setting, size)


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
        raise unknown_device_error(name) from None
    count = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}.get(device.type, 1)
    if (device.index or 0) >= count:
        raise InputError(f"there is no device '{name}' on this machine: use auto or cpu")
    return device


def needs_check(device: torch.device) -> bool:
    """Return whether a device must pass the device check before it is used; one line says where the check is off.

    Raises:
        InputError: the environment variable has an unknown value.
    """
    choice, is_cpu = os.environ.get(DEVICE_CHECK, "auto"), device.type == "cpu"
    if choice not in ("auto", "all", "off"):
        raise InputError(f"the environment variable {DEVICE_CHECK} is '{choice}'; expected auto, all or off")
    if choice == "off" and not is_cpu:
        _LOGGER.warning("nothing checks that %s computes correctly: %s is off", device, DEVICE_CHECK)
    return choice == "all" or (choice == "auto" and not is_cpu)


def too_many_threads(threads: int) -> str | None:
    """Return what is wrong with a number of CPU threads that only wait for each other; None: nothing."""
    processors = os.cpu_count() or 1
    if threads <= MOST_THREADS * processors:
        return None
    return (
        f"{threads} is far more than the {processors} processors of this machine; give at most "
        f"{MOST_THREADS * processors}"
    )


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


def total_memory() -> int:
    """Return the bytes of main memory that processes here can have, within the limit of their container."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _container_memory())])


def free_memory(device: torch.device | None = None) -> int:
    """Return the bytes of memory that this process can still take, within the limits of its container and its own.

    Args:
        device: whose memory; None, and every device without memory of its own: main memory.
    """
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + _reserved_bytes(device)
    free = [int(psutil.virtual_memory().available), *(free for _, free in _container_memory()), *_address_space()]
    return max(0, min(free))


def _address_space() -> Iterator[int]:
    """Yield the bytes of address space that this process can still take, if its address space is limited."""
    with contextlib.suppress(ImportError):
        import resource  # Windows has none

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            yield limit - int(psutil.Process().memory_info().vms)


def _reserved_bytes(device: torch.device) -> int:
    """Return the bytes that torch holds of an accelerator and has not given to a tensor."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _container_memory() -> Iterator[tuple[int, int]]:
    """Give the limit of every control group around this process, and what is free of it, in bytes."""
    with contextlib.suppress(OSError, ValueError):
        for line in _OWN_GROUPS.read_text("ascii").splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            # Version 2 has no kinds.
            root = _GROUPS / "memory" if kinds else _GROUPS
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
            # A container may not see the folder of its own path, but then the root is its own.
            group = root / path.strip("/")
            for folder in [group, *(parent for parent in group.parents if parent.is_relative_to(root))]:
                # No limit is the word "max", or more than any machine has.
                with contextlib.suppress(OSError, ValueError):
                    limit, used = (int((folder / name).read_text("ascii")) for name in names)
                    yield limit, limit - used + _cached_bytes(folder)


def _cached_bytes(group: Path) -> int:
    """Return the bytes of files in memory that the system gives up when a group needs memory."""
    lines = (group / "memory.stat").read_text("ascii").splitlines()
    fields = dict(line.split()[:2] for line in lines)
    return int(fields.get("active_file", 0)) + int(fields.get("inactive_file", 0))


def refuse_memory(needed: int, what: str, *, free: int | None = None, advice: str = "") -> None:
    """Refuse what does not fit into memory, before it takes any.

    Args:
        needed: bytes.
        what: needs them, for the message.
        free: bytes; None: of main memory, as `free_memory` says.
        advice: how to need less.

    Raises:
        LackOfMemory: it does not fit.
    """
    free = free_memory() if free is None else free
    if needed > free:
        raise LackOfMemory(
            f"{what} needs about {human_bytes(needed)} of memory, but only {human_bytes(free)} is free"
            f"{advice and f': {advice}'}"
        )
