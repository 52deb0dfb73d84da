"""The compiled kernels, loaded when they are first needed; threads that call them share the processors.

One team of threads after the other would lose much: teams whose threads sleep are slow to begin, and one late thread
keeps its team waiting. So if several threads call kernels, each gets its share of the threads, as long as no result
depends on their number. Kernels must use the OpenMP library of PyTorch: otherwise their threads would wait for each
other's processors.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Final

import torch

from clearhead.base.errors import InputError
from clearhead.fast import probe
from clearhead.fast.native import abi
from clearhead.fast.native.build import compile_library, find_compiled, find_packaged, refuse_untried
from clearhead.fast.native.options import INFERENCE

# Of its own, so that a command shows these messages wherever its output goes.
_LOGGER = logging.getLogger("clearhead.fast.native")
_COMPILER_NAMES: Final = {
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
_TESTED: Final[dict[str, ctypes.CDLL]] = {}


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
    return _TESTED.get(kernels) if _TESTED else _library(kernels)


def use_only(kernels: str, loaded: ctypes.CDLL) -> None:
    """Let this process, which tries a library, use it and no other."""
    _TESTED[kernels] = loaded


def find_library(kernels: str) -> tuple[Path, ctypes.CDLL] | None:
    """Return the library that serves here, and its file; None: it is compiled when it is first needed.

    Raises:
        OSError: none can serve; a sentence says why.
    """
    file = find_packaged(kernels) or find_compiled(_options(), kernels)
    if file is None:
        return None
    refuse_untried(file, kernels)
    return file, open_library(file)


def _options() -> list[str]:
    return ["-march=native", *_without(probe.processor().hidden)]


@cache
def _library(kernels: str) -> ctypes.CDLL | None:
    try:
        file = find_packaged(kernels) or compile_library(_options(), kernels)
        refuse_untried(file, kernels)
        loaded = open_library(file)
    except OSError as error:
        _LOGGER.warning("kernels of PyTorch are used, because our own could not be used: %s", error)
        return None
    _survive_forks()
    return loaded


def open_library(file: Path) -> ctypes.CDLL:
    """Load a library.

    Raises:
        OSError: it cannot be loaded, or is not fit for use.
    """
    loaded = ctypes.CDLL(str(file))
    refuse_unfit(loaded)
    return loaded


def refuse_unfit(loaded: ctypes.CDLL) -> None:
    """Refuse a library with other structures, with instructions that this processor lacks, or with threads of its own.

    Raises:
        OSError: it is not fit for use.
    """
    abi.check(loaded)
    if lacking := isa(loaded) - probe.processor().isa:
        raise OSError(f"they were compiled for {', '.join(sorted(lacking))}, which this processor does not have")
    refuse_other_openmp(loaded)


def isa(loaded: ctypes.CDLL) -> frozenset[str]:
    """Return the instruction sets that a library was compiled for."""
    loaded.isa.restype = ctypes.c_char_p
    return frozenset(loaded.isa().decode().split())


def has_gemm(kernels: str = INFERENCE) -> bool:
    """Return whether kernels multiply many rows in blocks, which takes AMX or AVX-512 for bf16."""
    loaded = library(kernels)
    return loaded is not None and bool(loaded.has_gemm())


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
    loaded = library(kernels)
    return None if loaded is None else _kernel(loaded, name, pointers, numbers, is_shared=kernels == INFERENCE)


@cache
def _kernel(
    loaded: ctypes.CDLL, name: str, pointers: int, numbers: int, *, is_shared: bool
) -> Callable[..., None] | None:
    kernel = getattr(loaded, name, None)
    if kernel is None:
        return None
    kernel.restype = None
    kernel.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * (numbers + 1)

    take_threads = _SHARES.shared if is_shared else _SHARES.alone

    def run(*arguments: int | None) -> None:
        with take_threads(torch.get_num_threads()) as threads:
            kernel(*arguments, threads)

    return run


def _without(hidden: frozenset[str]) -> Iterator[str]:
    return (f"-mno-{name}" for isa in sorted(hidden) for name in _COMPILER_NAMES[isa])


@cache
def _survive_forks() -> None:
    # The other threads of OpenMP are not in a child.
    _SHARES.prepare_for_forks(lambda: torch.set_num_threads(1))


RECENT: Final = 0.02
"""Seconds after a call for which its thread is taken to be about to make another one."""


class ThreadShares:
    """The calls of kernels in a process, by the threads that make them.

    Args:
        clock: gives the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition(threading.Lock())
        self._running: set[threading.Thread] = set()
        self._ended: dict[threading.Thread, float] = {}
        self._alone = threading.RLock()

    def shared(self, threads: int) -> AbstractContextManager[int]:
        """Take part beside other calls, with so many of the threads, at least 1."""
        return _SharedCall(self, threads)

    def begin(self, threads: int) -> int:
        """Begin a call beside others, which `end` ends, and return its share of the threads."""
        caller = threading.current_thread()
        with self._changed:
            others = {*self._running, *self._ended} - {caller}
            if others:
                recent = self._clock() - RECENT
                self._ended = {other: end for other, end in self._ended.items() if end > recent and other.is_alive()}
                others &= {*self._running, *self._ended}
            self._running.add(caller)
        return max(1, threads // (1 + len(others)))

    def end(self) -> None:
        """End the call of this thread."""
        caller = threading.current_thread()
        with self._changed:
            self._running.discard(caller)
            self._ended[caller] = self._clock()
            self._changed.notify_all()

    @contextmanager
    def alone(self, threads: int) -> Iterator[int]:
        """Take a turn among the calls whose results depend on the number of threads, with all of them."""
        with self._alone, self.shared(threads):
            yield threads

    def prepare_for_forks(self, begin_child: Callable[[], object]) -> None:
        """From now on let the process fork between calls only, and the child begin with what is given."""

        def hold() -> None:
            self._changed.acquire()
            self._changed.wait_for(lambda: not self._running)

        def begin() -> None:
            self._changed.release()
            self._alone = threading.RLock()
            begin_child()

        os.register_at_fork(before=hold, after_in_parent=self._changed.release, after_in_child=begin)


class _SharedCall:
    """A call as a block; a generator's would take several times as long, at each of the calls of a step."""

    def __init__(self, shares: ThreadShares, threads: int) -> None:
        self._turns, self._threads = shares, threads

    def __enter__(self) -> int:
        return self._turns.begin(self._threads)

    def __exit__(self, *_: object) -> None:
        self._turns.end()


_SHARES: Final = ThreadShares()


_SYMBOL: Final = "omp_get_max_threads"


class _AddressInfo(ctypes.Structure):
    """What the dynamic linker knows of an address (`Dl_info`)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def refuse_other_openmp(library: ctypes.CDLL) -> None:
    """Refuse a library whose threads are not those of PyTorch.

    Raises:
        OSError: they are not.
    """
    library.openmp.restype = ctypes.c_void_p
    kernels_file, torch_file = _file_of(library.openmp()), _file_of(_torch_openmp())
    if kernels_file is None or kernels_file != torch_file:
        raise OSError(f"their threads would be those of {kernels_file}, and PyTorch has those of {torch_file}")


def _torch_openmp() -> int | None:
    """Return the address that PyTorch's libraries find: in what the whole program shares, then in what they need."""
    torch_library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for library in (None, str(torch_library)):
        function = getattr(ctypes.CDLL(library), _SYMBOL, None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _file_of(address: int | None) -> str | None:
    address_info = _AddressInfo()
    is_found = address is not None and ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(address_info))
    return os.path.realpath(os.fsdecode(address_info.file)) if is_found else None
