"""Choose how waiting threads behave: they wait busily only while no other program needs their processors.

PyTorch uses GCC's OpenMP library. A thread that waits for another one checks again and again for some milliseconds
before it sleeps. On an idle machine nothing is faster. But if another program needs the processor, busy waiting takes
time from the thread that is waited for, and work takes several times as long.

The library reads the duration of busy waiting from the environment when it is loaded. But while it has more threads
than there are processors, each thread checks only for a moment. So this module adds a team of sleeping threads and ends
it again, which switches between the two modes in a running process. No result depends on it.

Source: GCC, libgomp/config/linux/wait.h, do_spin; libgomp/team.c, gomp_managed_threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

SPARE: Final = 0.3
"""Number of processors that other programs may take before waiting threads sleep."""
LOOKS_BEFORE_MESSAGE: Final = 10
"""Number of checks in a row with too few free processors after which a message is logged."""
FIRST_TRIAL, LAST_TRIAL = 4, 64
"""Sleeping threads wait busily again for one check after this many checks, and then after twice as many each time.

The load of other programs while our threads sleep does not predict their load while our threads wait busily. A program
of low priority takes any free time.
"""
_SECONDS: Final = 1.0
_STATISTICS: Final = Path("/proc/stat")
_CHOSEN_BY: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# A separate name, so that a command shows these messages wherever its output goes.
_LOGGER = logging.getLogger("clearhead.fast.busy_waiting")


def adapt_waiting() -> None:
    """Start a thread that adapts busy waiting in this process to other programs; later calls do nothing.

    Nothing happens if the user has set one of the environment variables for it, or the system is not Linux.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in _CHOSEN_BY):
        # A forked child has no threads of its parent.
        _start_watching(os.getpid())


@functools.cache
def _start_watching(_process: int) -> None:
    threading.Thread(target=_watch_load, name="clearhead waiting", daemon=True).start()


def _watch_load() -> None:
    # RuntimeError: no thread can be started, for example while the program ends.
    with contextlib.suppress(OSError, ValueError, IndexError, RuntimeError):
        waiting, before = SpinPolicy(OpenMP()), Usage.now()
        while True:
            time.sleep(_SECONDS)
            now = Usage.now()
            waiting.look(now.others_since(before), len(os.sched_getaffinity(0)))
            before = now


@dataclass(frozen=True)
class Usage:
    """Processor time used on the processors on which this process may run, in seconds.

    Attributes:
        time: time of the measurement.
        busy: processor time of all programs.
        own_process: processor time of this process.
    """

    time: float
    busy: float
    own_process: float

    @classmethod
    def now(cls) -> Usage:
        """Measure the current usage.

        Raises:
            OSError, ValueError, IndexError: the system does not report it.
        """
        processors = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = 0
        for line in _STATISTICS.read_text("ascii").splitlines():
            name, *counts = line.split()
            if name in processors:
                user, nice, system, _, _, interrupts, soft, stolen = map(int, counts[:8])
                ticks += user + nice + system + interrupts + soft + stolen
        return cls(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())

    def others_since(self, before: Usage) -> float:
        """Return the number of processors that other programs used since an earlier measurement, 0 or more."""
        others = self.busy - before.busy - (self.own_process - before.own_process)
        return max(0.0, others / max(1e-9, self.time - before.time))


@runtime_checkable
class Threads(Protocol):
    """Interface to PyTorch's threads: makes them sleep or wait busily."""

    @property
    def count(self) -> int:
        """Number of threads that PyTorch computes with; 1 before PyTorch is imported."""

    def sleep(self) -> bool:
        """Make the threads sleep while they wait; return whether that is possible."""

    def spin(self) -> None:
        """Make the threads wait busily again."""


class SpinPolicy:
    """Decides whether threads wait busily or sleep, from the processor use of other programs.

    Args:
        threads: the threads that wait.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._asleep: bool | None = None
        self._looks = self._slept = 0
        self._trial = FIRST_TRIAL

    def look(self, others: float, processors: int) -> None:
        """Let the threads sleep or wait busily until the next check, depending on the load of other programs.

        Args:
            others: number of processors that other programs used since the last check.
            processors: number of processors on which this process may run.
        """
        count = self._threads.count if others > SPARE else 1
        if count == 1 or count + others <= processors + SPARE:
            self._spin()
            self._looks, self._trial = 0, FIRST_TRIAL
            return
        self._looks += 1
        if self._asleep is None:
            self._asleep, self._slept = self._threads.sleep(), 0
        elif self._asleep and self._slept == self._trial:
            self._spin()
            self._trial = min(2 * self._trial, LAST_TRIAL)
        self._slept += 1
        if self._looks == LOOKS_BEFORE_MESSAGE:
            self._log_slowdown(others, processors)

    def _spin(self) -> None:
        if self._asleep:
            self._threads.spin()
        self._asleep = None

    def _log_slowdown(self, others: float, processors: int) -> None:
        observation = f"other programs use {others:.1f} of the {processors} processors"
        if self._asleep is not False:
            _LOGGER.info("%s, so this command takes longer", observation)
        else:
            _LOGGER.warning(
                "%s, and busy waiting slows this command down further: restart it with the "
                "environment variable OMP_WAIT_POLICY=passive, or with one thread",
                observation,
            )


class OpenMP:
    """The threads of the OpenMP library that this process has loaded with PyTorch."""

    def __init__(self) -> None:
        self._ended: threading.Event | None = None

    @property
    def count(self) -> int:
        """Number of threads that PyTorch computes with; 1 before PyTorch is imported."""
        count_threads = getattr(sys.modules.get("torch"), "get_num_threads", None)
        if count_threads is None:
            return 1
        # PyTorch keeps the number for each thread; a new thread has the number that was set last.
        with ThreadPoolExecutor(1) as fresh:
            return int(fresh.submit(count_threads).result())

    def sleep(self) -> bool:
        """Make the library's threads wait asleep: add sleeping threads until it has more threads than processors."""
        library = _libgomp()
        if library is None:
            return False
        self._ended = ended = threading.Event()
        library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        nothing = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)
        count = len(os.sched_getaffinity(0)) + 1

        def hold_team() -> None:
            library.GOMP_parallel(nothing, None, count, 0)
            ended.wait()

        # The team of threads ends with the thread that started it.
        threading.Thread(target=hold_team, name="clearhead asleep", daemon=True).start()
        return True

    def spin(self) -> None:
        """End the added sleeping threads, so that waiting threads are busy again."""
        if self._ended is not None:
            self._ended.set()


def _libgomp() -> ctypes.CDLL | None:
    """Return GCC's OpenMP library if PyTorch has loaded it, else None."""
    folder = Path(str(sys.modules["torch"].__file__)).parent / "lib"
    for name in (*map(str, sorted(folder.glob("libgomp*.so*"))), "libgomp.so.1"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    return None
