"""Calls of kernels by several threads of a process: they share the processors, and a process forks between them.

One team of threads after the other would lose much: teams whose threads sleep are slow to begin, and one thread that is
late keeps its team waiting. So where several threads call kernels each gets its share of the threads, as long as no
result depends on how many there are.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

RECENT: Final = 0.02
"""Seconds after a call for which its thread is taken to be about to make another one."""


class Turns:
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
        return _Share(self, threads)

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

    def stay_whole_in_forks(self, begin_child: Callable[[], object]) -> None:
        """From now on let the process fork between calls only, and the child begin with what is given."""

        def hold() -> None:
            self._changed.acquire()
            self._changed.wait_for(lambda: not self._running)

        def begin() -> None:
            self._changed.release()
            self._alone = threading.RLock()
            begin_child()

        os.register_at_fork(before=hold, after_in_parent=self._changed.release, after_in_child=begin)


class _Share:
    """A call as a block; a generator's would take several times as long, at each of the calls of a step."""

    def __init__(self, turns: Turns, threads: int) -> None:
        self._turns, self._threads = turns, threads

    def __enter__(self) -> int:
        return self._turns.begin(self._threads)

    def __exit__(self, *_: object) -> None:
        self._turns.end()
