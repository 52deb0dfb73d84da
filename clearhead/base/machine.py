"""Properties of this machine: the device and precision that "auto" selects, and memory."""

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
"""Environment of child processes that import no modules from the working directory, such as a random.py there."""
DEVICE_CHECK: Final = "CLEARHEAD_DEVICE_CHECK"
MOST_THREADS: Final = 4
"""Maximum number of threads per processor; more threads would only wait for each other."""

# Parameters of mallopt; freed blocks larger than `_LARGEST_KEPT` bytes always go back to the system.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_LARGEST_KEPT: Final = 32 << 20

_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN_GROUPS: Final = Path("/proc/self/cgroup")
_LOGGER: Final = logging.getLogger("clearhead.base.machine")


def give_memory_back() -> None:
    """Return freed memory from the C library to the system (glibc only)."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for later tensors (glibc only).

    Otherwise a training step may get its larger tensors from the system, which clears their memory each time. Settings
    of malloc in the environment have priority.
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
    """Return whether a device must pass the device check before it is used; log a warning if the check is off.

    Raises:
        InputError: the environment variable has an unknown value.
    """
    choice, is_cpu = os.environ.get(DEVICE_CHECK, "auto"), device.type == "cpu"
    if choice not in ("auto", "all", "off"):
        raise InputError(f"the environment variable {DEVICE_CHECK} is '{choice}'; expected auto, all or off")
    if choice == "off" and not is_cpu:
        _LOGGER.warning("the results of %s are not checked, because %s is off: set it to auto", device, DEVICE_CHECK)
    return choice == "all" or (choice == "auto" and not is_cpu)


def too_many_threads(threads: int) -> str | None:
    """Return a message if `threads` CPU threads are too many for this machine; None if they are not."""
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
    """Return the size of the main memory in bytes, or the container's memory limit if that is lower."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _container_memory())])


def free_memory(device: torch.device | None = None) -> int:
    """Return the free bytes of memory for this process, within the limits of its container and its address space.

    Args:
        device: the device with the memory. None, and any device without its own memory, means main memory.
    """
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + _idle_bytes(device)
    free = [int(psutil.virtual_memory().available), *(free for _, free in _container_memory()), *_address_space()]
    return max(0, min(free))


def _address_space() -> Iterator[int]:
    """Yield the free bytes of address space, if the address space of this process is limited."""
    with contextlib.suppress(ImportError):
        import resource  # Windows has none

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            yield limit - int(psutil.Process().memory_info().vms)


def _idle_bytes(device: torch.device) -> int:
    """Return the number of bytes that torch has reserved on an accelerator and that no tensor uses."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _container_memory() -> Iterator[tuple[int, int]]:
    """Yield (limit, free bytes) of every control group around this process."""
    with contextlib.suppress(OSError, ValueError):
        for line in _OWN_GROUPS.read_text("ascii").splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            # Control groups of version 2 have no kinds.
            root = _GROUPS / "memory" if kinds else _GROUPS
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
            # A container may not see the folder of its path; then the root is its own group.
            group = root / path.strip("/")
            for folder in [group, *(parent for parent in group.parents if parent.is_relative_to(root))]:
                # "No limit" is the word "max", or a number larger than any memory.
                with contextlib.suppress(OSError, ValueError):
                    limit, used = (int((folder / name).read_text("ascii")) for name in names)
                    yield limit, limit - used + _file_cache_bytes(folder)


def _file_cache_bytes(group: Path) -> int:
    """Return the size in bytes of the file cache of a control group, which the system can free."""
    lines = (group / "memory.stat").read_text("ascii").splitlines()
    fields = dict(line.split()[:2] for line in lines)
    return int(fields.get("active_file", 0)) + int(fields.get("inactive_file", 0))


def refuse_memory(needed: int, what: str, *, free: int | None = None, advice: str = "") -> None:
    """Refuse work that needs more memory than is free, before it begins.

    Args:
        needed: the needed bytes.
        what: the work, for the message.
        free: the free bytes. None means the free main memory.
        advice: a way to need less memory, for the message.

    Raises:
        LackOfMemory: the memory is not enough.
    """
    free = free_memory() if free is None else free
    if needed > free:
        raise LackOfMemory(
            f"{what} needs about {human_bytes(needed)} of memory, but only {human_bytes(free)} is free"
            f"{advice and f': {advice}'}"
        )
