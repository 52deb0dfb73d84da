"""Ctrl-C and SIGTERM while training: note them, finish the step, save, and leave."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any


class Interrupted(Exception):
    """A run was stopped by a signal after everything was saved.

    Args:
        number: the signal.
        run: the run directory.
        step: optimizer steps taken and saved.
    """

    def __init__(self, number: signal.Signals, run: Path, step: int) -> None:
        super().__init__(
            f"Stopped by {number.name} after step {step}; everything is saved in {run}. "
            "The same command with --resume goes on exactly from here."
        )
        self.signal = number
        self.exit_code = 128 + number
        self.run = run
        self.step = step


class StopRequested(BaseException):
    """Leaves a piece of work that may be abandoned; not an Exception, so that nobody's error handling swallows it."""


class StopSignals:
    """Notes SIGINT and SIGTERM while its block runs; a second SIGINT stops at once.

    Attributes:
        received: the first signal that came, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._abandon = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        # Python lets only the main thread install handlers; elsewhere the program around us decides
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def abandoning(self) -> Iterator[None]:
        """Raise StopRequested inside this block when a signal comes, instead of waiting for its end."""
        self._abandon = True
        try:
            if self.received is not None:
                raise StopRequested
            yield
        finally:
            self._abandon = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.received = signal.Signals(number)
        if self._abandon:
            raise StopRequested
