"""Threads that wait busily for each other only while no other program needs their processors.

In GCC's OpenMP library, which PyTorch brings, a thread that waits for another one looks again and again, for some
milliseconds, before it sleeps. Alone on a machine nothing is faster. Beside another program it takes the time of the
thread that it waits for, and work takes several times as long. For how long a thread looks is read from the environment
when the library is loaded; but while the library has more threads than there are processors, each looks for a moment
only. So some threads that sleep, added beside those that work and ended again, switch between the two in a running
process, whatever loaded PyTorch. No result depends on it.

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
"""Others may take so much of a processor before threads sleep while they wait."""
LOOKS_BEFORE_MESSAGE: Final = 10
"""After so many looks in a row that find too few processors, one sentence says so."""
FIRST_TRIAL, LAST_TRIAL = 4, 64
"""Threads that sleep wait busily again for one look after so many, and then after twice as many each time.

What another program takes while threads sleep does not say what it would take from threads that do not: one of low
priority takes what is left.
"""
_SECONDS: Final = 1.0
_STATISTICS: Final = Path("/proc/stat")
_CHOSEN_BY: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# Of its own, so that a command shows these messages wherever its output goes.
_LOGGER = logging.getLogger("clearhead.fast.busy_waiting")


def adapt_waiting() -> None:
    """Let this process's threads, from now on, wait in the way that suits what else runs; done once.

    Nothing happens where the user has chosen a way by a variable of the environment, or the system is not Linux.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in _CHOSEN_BY):
        # A forked child has no threads of its parent.
        _start_watching(os.getpid())


@functools.cache
def _start_watching(_process: int) -> None:
    threading.Thread(target=_watch_load, name="clearhead waiting", daemon=True).start()


def _watch_load() -> None:
    # RuntimeError: no thread can be started, as when the program ends.
    with contextlib.suppress(OSError, ValueError, IndexError, RuntimeError):
        waiting, before = SpinPolicy(OpenMP()), Usage.now()
        while True:
            time.sleep(_SECONDS)
            now = Usage.now()
            waiting.look(now.others_since(before), len(os.sched_getaffinity(0)))
            before = now


@dataclass(frozen=True)
class Usage:
    """What was used of the processors on which this process may run, in seconds.

    Attributes:
        time: at which it was looked up.
        busy: used by all programs.
        own: used by this process.
    """

    time: float
    busy: float
    own_process: float

    @classmethod
    def now(cls) -> Usage:
        """Look it up.

        Raises:
            OSError, ValueError, IndexError: the system does not say it.
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
        """Return how many processors other programs used since an earlier look, 0 or more."""
        others = self.busy - before.busy - (self.own_process - before.own_process)
        return max(0.0, others / max(1e-9, self.time - before.time))


@runtime_checkable
class Threads(Protocol):
    """The threads of PyTorch, and how they wait."""

    @property
    def count(self) -> int:
        """How many work together; 1 before there are any."""

    def sleep(self) -> bool:
        """Let them sleep while they wait, and return whether that is possible."""

    def spin(self) -> None:
        """Let them wait busily again."""


class SpinPolicy:
    """Decides how threads wait by what other programs use.

    Args:
        threads: that wait.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._asleep: bool | None = None
        self._looks = self._slept = 0
        self._trial = FIRST_TRIAL

    def look(self, others: float, processors: int) -> None:
        """Let the threads wait in the way that suits.

        Args:
            others: how many processors other programs used since the last look.
            processors: on which this process may run.
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
            _LOGGER.info("%s, so this takes longer than it would alone", observation)
        else:
            _LOGGER.warning(
                "%s, and threads that wait busily for each other lose far more than that: start anew with the "
                "environment variable OMP_WAIT_POLICY=passive, or with one thread",
                observation,
            )


class OpenMP:
    """The threads of the OpenMP library that this process has loaded with PyTorch."""

    def __init__(self) -> None:
        self._ended: threading.Event | None = None

    @property
    def count(self) -> int:
        """How many work together; 1 before PyTorch is imported."""
        count_threads = getattr(sys.modules.get("torch"), "get_num_threads", None)
        if count_threads is None:
            return 1
        # PyTorch counts for each thread; a new one has the number that was set last.
        with ThreadPoolExecutor(1) as fresh:
            return int(fresh.submit(count_threads).result())

    def sleep(self) -> bool:
        """Add threads that sleep, until the library has more of them than processors."""
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

        # A thread's own team of threads ends with it.
        threading.Thread(target=hold_team, name="clearhead asleep", daemon=True).start()
        return True

    def spin(self) -> None:
        """End the added threads."""
        if self._ended is not None:
            self._ended.set()


def _libgomp() -> ctypes.CDLL | None:
    """Return the library, if PyTorch has loaded GCC's."""
    folder = Path(str(sys.modules["torch"].__file__)).parent / "lib"
    for name in (*map(str, sorted(folder.glob("libgomp*.so*"))), "libgomp.so.1"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    return None
