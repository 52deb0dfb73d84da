"""The compiled kernels, loaded when they are first needed; threads that call them share the processors."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

import torch

from clearhead.base.errors import InputError
from clearhead.fast import probe
from clearhead.fast.native import abi
from clearhead.fast.native.build import compiled, kept, packaged
from clearhead.fast.native.openmp import refuse_other_openmp
from clearhead.fast.native.options import INFERENCE
from clearhead.fast.native.turns import Turns
from clearhead.fast.native.verdict import refuse_untried

# Of its own, so that a command shows these messages wherever its output goes.
_LOGGER = logging.getLogger("clearhead.fast.native")
_OFF: Final = {
    "avx2": ("avx2",),
    "avx_vnni": ("avxvnni",),
    "avx512": ("avx512f",),
    "avx512_vnni": ("avx512vnni",),
    "avx512_bf16": ("avx512bf16",),
    "amx": ("amx-tile", "amx-int8", "amx-bf16"),
}
"""What a compiler calls them."""
KERNELS: Final = "CLEARHEAD_KERNELS"
"""The environment variable: "plain" uses no kernels of ours, "auto" (as where it is not set) what is fastest."""
_TURNS: Final = Turns()
_GIVEN: Final[dict[str, ctypes.CDLL]] = {}


def uses_kernels() -> bool:
    """Return whether kernels, and other trees than the plain one, are wanted.

    Raises:
        InputError: the environment variable says neither.
    """
    choice = os.environ.get(KERNELS, "auto")
    if choice not in ("auto", "plain"):
        raise InputError(f"the environment variable {KERNELS} is '{choice}'; expected auto or plain")
    return choice == "auto"


def library(kernels: str = INFERENCE) -> ctypes.CDLL | None:
    """Return the compiled kernels of a folder, or None where they are not wanted or cannot be had.

    The reason for the latter is logged as a warning, once.
    """
    if not uses_kernels():
        return None
    return _GIVEN.get(kernels) if _GIVEN else _library(kernels)


def serve_only(kernels: str, found: ctypes.CDLL) -> None:
    """Let this process, which tries a library, use it and no other."""
    _GIVEN[kernels] = found


def found_library(kernels: str) -> tuple[Path, ctypes.CDLL] | None:
    """Return the library that serves here, and its file; None: it is compiled when it is first needed.

    Raises:
        OSError: none can serve; a sentence says why.
    """
    file = packaged(kernels) or kept(_options(), kernels)
    if file is None:
        return None
    refuse_untried(file, kernels)
    return file, opened(file)


def _options() -> list[str]:
    return ["-march=native", *_without(probe.processor().hidden)]


@cache
def _library(kernels: str) -> ctypes.CDLL | None:
    try:
        file = packaged(kernels) or compiled(_options(), kernels)
        refuse_untried(file, kernels)
        found = opened(file)
    except OSError as error:
        _LOGGER.warning("kernels of PyTorch are used, because our own could not be used: %s", error)
        return None
    _survive_forks()
    return found


def opened(file: Path) -> ctypes.CDLL:
    """Load a library.

    Raises:
        OSError: it cannot be loaded, or is not fit for use.
    """
    found = ctypes.CDLL(str(file))
    refuse_unfit(found)
    return found


def refuse_unfit(found: ctypes.CDLL) -> None:
    """Refuse a library with other structures, with instructions that this processor lacks, or with threads of its own.

    Raises:
        OSError: it is not fit for use.
    """
    abi.check(found)
    if lacking := isa(found) - probe.processor().isa:
        raise OSError(f"they were compiled for {', '.join(sorted(lacking))}, which this processor does not have")
    refuse_other_openmp(found)


def isa(found: ctypes.CDLL) -> frozenset[str]:
    """Return the instruction sets that a library was compiled for."""
    found.isa.restype = ctypes.c_char_p
    return frozenset(found.isa().decode().split())


def has_gemm(kernels: str = INFERENCE) -> bool:
    """Return whether kernels multiply many rows in blocks, which takes AMX or AVX-512 for bf16."""
    found = library(kernels)
    return found is not None and bool(found.has_gemm())


def function(name: str, *, pointers: int, numbers: int = 0, kernels: str = INFERENCE) -> Callable[..., None] | None:
    """Return a kernel, which takes addresses and then whole numbers.

    It runs with as many threads as PyTorch is set to use, or with a share of them beside calls of other threads; those
    for training take turns.

    Args:
        name: of the kernel.
        pointers: how many addresses.
        numbers: how many whole numbers, beside that of the threads.
        kernels: their folder.

    Returns:
        None where there are no kernels, or none of this name for this processor.
    """
    found = library(kernels)
    return None if found is None else _kernel(found, name, pointers, numbers)


@cache
def _kernel(found: ctypes.CDLL, name: str, pointers: int, numbers: int) -> Callable[..., None] | None:
    kernel = getattr(found, name, None)
    if kernel is None:
        return None
    kernel.restype = None
    kernel.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * (numbers + 1)

    turn = _TURNS.shared if found is library(INFERENCE) else _TURNS.alone

    def run(*arguments: int | None) -> None:
        with turn(torch.get_num_threads()) as threads:
            kernel(*arguments, threads)

    return run


def _without(hidden: frozenset[str]) -> Iterator[str]:
    return (f"-mno-{name}" for isa in sorted(hidden) for name in _OFF[isa])


@cache
def _survive_forks() -> None:
    # The other threads of OpenMP are not in a child.
    _TURNS.stay_whole_in_forks(lambda: torch.set_num_threads(1))
