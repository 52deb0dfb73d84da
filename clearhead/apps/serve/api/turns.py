"""The thread of all engines."""

from __future__ import annotations

import threading
from typing import Protocol, runtime_checkable


@runtime_checkable
class Turning(Protocol):
    """An engine."""

    @property
    def is_due(self) -> bool:
        """Whether there is something for a turn."""

    def turn(self) -> None:
        """Do a small part of the work that there is."""

    def fail(self, error: Exception) -> None:
        """Tell those who wait that a turn has failed."""


class Turns:
    """The thread in which the engines of this process take turns.

    Threads of OpenMP belong to the thread that calls them. Those of two engines would be more than there are
    processors, and sleep whenever they wait for each other: steps would take twice as long, even while only one model
    is asked.
    """

    def __init__(self) -> None:
        self.changed: threading.Condition = threading.Condition()
        self._engines: list[Turning] = []
        self._turning: Turning | None = None
        self._thread: threading.Thread | None = None

    def add(self, engine: Turning) -> None:
        """Let an engine take part; the first one starts the thread."""
        with self.changed:
            self._engines.append(engine)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
                self._thread.start()

    def remove(self, engine: Turning) -> None:
        """Let an engine take part no more, once its turn has ended; the thread ends with the last one."""
        with self.changed:
            if engine in self._engines:
                self._engines.remove(engine)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._turning is not engine)

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: not self._engines or any(engine.is_due for engine in self._engines))
                if not self._engines:
                    self._thread = None
                    return
                due = [engine for engine in self._engines if engine.is_due]
            for engine in due:
                with self.changed:
                    if engine not in self._engines:
                        continue
                    self._turning = engine
                try:
                    engine.turn()
                except Exception as error:  # noqa: BLE001 - a thread that ends would leave all clients waiting
                    engine.fail(error)
                with self.changed:
                    self._turning = None
                    self.changed.notify_all()
