"""The compiled kernels: loaded at their first use; threads that call them share the processors.

If concurrent calls took turns, much time would be lost: sleeping threads start slowly, and one late thread makes its
team wait. So if several threads call kernels, each gets a share of the threads, as long as no result depends on their
number. Kernels must use the OpenMP library of PyTorch. The threads of two libraries would wait for the same processors.
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

# A separate name, so that a command shows these messages wherever its output goes.
_LOGGER = logging.getLogger("clearhead.fast.native")
_COMPILER_NAMES: Final = {
    "avx2": ("avx2",),
    "avx_vnni": ("avxvnni",),
    "avx512": ("avx512f",),
    "avx512_vnni": ("avx512vnni",),
    "avx512_bf16": ("avx512bf16",),
    "amx": ("amx-tile", "amx-int8", "amx-bf16"),
}
"""Names of the instruction sets in compiler options."""
KERNELS: Final = "CLEARHEAD_KERNELS"
"""Environment variable: "plain" turns the compiled kernels off, "auto" (the default) uses the fastest ones."""
_TESTED: Final[dict[str, ctypes.CDLL]] = {}


def uses_kernels() -> bool:
    """Return whether to use the compiled kernels and the replicas that call them.

    Raises:
        InputError: the environment variable is neither auto nor plain.
    """
    choice = os.environ.get(KERNELS, "auto")
    if choice not in ("auto", "plain"):
        raise InputError(f"the environment variable {KERNELS} must be auto or plain, got '{choice}'")
    return choice == "auto"


def library(kernels: str = INFERENCE) -> ctypes.CDLL | None:
    """Return the compiled kernels of a folder, or None if they are turned off or unavailable.

    The reason for unavailable kernels is logged once, as a warning.
    """
    if not uses_kernels():
        return None
    return _TESTED.get(kernels) if _TESTED else _library(kernels)


def use_only(kernels: str, loaded: ctypes.CDLL) -> None:
    """Make this process use only the loaded library, which it tests."""
    _TESTED[kernels] = loaded


def find_library(kernels: str) -> tuple[Path, ctypes.CDLL] | None:
    """Return the file of the library for this processor, and the loaded library; None if it is not compiled yet.

    Raises:
        OSError: no library works on this machine; the message says why.
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
        _LOGGER.warning("PyTorch's kernels are used, because the compiled kernels are not available: %s", error)
        return None
    _survive_forks()
    return loaded


def open_library(file: Path) -> ctypes.CDLL:
    """Load a library.

    Raises:
        OSError: the library cannot be loaded, or is not fit for use.
    """
    loaded = ctypes.CDLL(str(file))
    refuse_unfit(loaded)
    return loaded


def refuse_unfit(loaded: ctypes.CDLL) -> None:
    """Refuse compiled kernels that do not fit this package's C structures, this processor or PyTorch's threads.

    Raises:
        OSError: a structure differs, the processor lacks an instruction set, or they use another OpenMP library.
    """
    abi.check(loaded)
    if lacking := isa(loaded) - probe.processor().isa:
        raise OSError(f"they were compiled for {', '.join(sorted(lacking))}, which this processor lacks")
    refuse_other_openmp(loaded)


def isa(loaded: ctypes.CDLL) -> frozenset[str]:
    """Return the instruction sets that a library was compiled for."""
    loaded.isa.restype = ctypes.c_char_p
    return frozenset(loaded.isa().decode().split())


def has_gemm(kernels: str = INFERENCE) -> bool:
    """Return whether kernels multiply many rows in blocks, which needs AMX or AVX-512 for bf16."""
    loaded = library(kernels)
    return loaded is not None and bool(loaded.has_gemm())


def function(name: str, *, pointers: int, numbers: int = 0, kernels: str = INFERENCE) -> Callable[..., None] | None:
    """Return a kernel as a function of addresses followed by integers.

    It runs with the number of threads that PyTorch is set to use, or with a share of them during calls of other
    threads. Training kernels run one at a time.

    Args:
        name: name of the kernel.
        pointers: number of addresses.
        numbers: number of integers, without the number of threads.
        kernels: folder of the kernel.

    Returns:
        The function, or None without kernels or without a kernel of this name for this processor.
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

    take_threads = _SHARES.share if is_shared else _SHARES.alone

    def run(*arguments: int | None) -> None:
        with take_threads(torch.get_num_threads()) as threads:
            kernel(*arguments, threads)

    return run


def _without(hidden: frozenset[str]) -> Iterator[str]:
    return (f"-mno-{name}" for isa in sorted(hidden) for name in _COMPILER_NAMES[isa])


@cache
def _survive_forks() -> None:
    # A forked child process does not have the other threads of OpenMP.
    _SHARES.prepare_for_forks(lambda: torch.set_num_threads(1))


RECENT: Final = 0.02
"""Seconds after a call during which its thread is expected to make another one."""


class ThreadShares:
    """Divides PyTorch's threads among concurrent kernel calls of several Python threads.

    Args:
        clock: function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition(threading.Lock())
        self._running: set[threading.Thread] = set()
        self._ended: dict[threading.Thread, float] = {}
        self._alone = threading.RLock()

    def share(self, threads: int) -> AbstractContextManager[int]:
        """Return a context manager for a kernel call that shares the threads; it yields their number for the call."""
        return _SharedCall(self, threads)

    def begin(self, threads: int) -> int:
        """Begin a call and return its number of threads, at least 1; `end` ends the call."""
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
        """Yield all threads, one call at a time: for calls whose results depend on the number of threads."""
        with self._alone, self.share(threads):
            yield threads

    def prepare_for_forks(self, begin_child: Callable[[], object]) -> None:
        """From now on, fork only between calls, and run `begin_child` in the child process."""

        def hold() -> None:
            self._changed.acquire()
            self._changed.wait_for(lambda: not self._running)

        def begin() -> None:
            self._changed.release()
            self._alone = threading.RLock()
            begin_child()

        os.register_at_fork(before=hold, after_in_parent=self._changed.release, after_in_child=begin)


class _SharedCall:
    """A shared call as a context manager; a generator would take several times as long at each call of a step."""

    def __init__(self, shares: ThreadShares, threads: int) -> None:
        self._shares, self._threads = shares, threads

    def __enter__(self) -> int:
        return self._shares.begin(self._threads)

    def __exit__(self, *_: object) -> None:
        self._shares.end()


_SHARES: Final = ThreadShares()


_SYMBOL: Final = "omp_get_max_threads"


class _AddressInfo(ctypes.Structure):
    """Facts of the dynamic linker about an address (`Dl_info`)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def refuse_other_openmp(library: ctypes.CDLL) -> None:
    """Refuse a library that does not use the threads of PyTorch.

    Raises:
        OSError: the library uses another OpenMP library.
    """
    library.openmp.restype = ctypes.c_void_p
    kernels_file, torch_file = _file_of(library.openmp()), _file_of(_torch_openmp())
    if kernels_file is None or kernels_file != torch_file:
        raise OSError(f"they use the OpenMP threads of {kernels_file}, expected those of PyTorch, {torch_file}")


def _torch_openmp() -> int | None:
    """Return the address of OpenMP that PyTorch's libraries find: in the program's global scope, then in their own."""
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
