"""Ctrl-C and SIGTERM during training: finish the step, save a checkpoint and stop."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any


class Interrupted(Exception):
    """Raised when a signal stopped a run; everything is saved.

    Args:
        number: the signal.
        run: the run directory.
        step: the number of saved optimizer steps.
    """

    def __init__(self, number: signal.Signals, run: Path, step: int) -> None:
        super().__init__(
            f"Stopped by {number.name} after step {step}; everything is saved in {run}. "
            "The same command with --resume continues from here."
        )
        self.signal = number
        self.exit_code: int = 128 + number
        self.run = run
        self.step = step


class StopRequested(BaseException):
    """Raised to interrupt a validation; a BaseException, so that `except Exception` does not catch it."""


class StopSignals:
    """Records SIGINT and SIGTERM during its with block; a second SIGINT stops at once.

    Args:
        is_alone: False if torchrun runs several processes. When one process ends, torchrun sends SIGTERM to the others.
            A block that ends with an error then ignores SIGTERM, so that it can report the error.

    Attributes:
        received: the first signal. None means no signal so far.
    """

    def __init__(self, *, is_alone: bool = True) -> None:
        self.received: signal.Signals | None = None
        self._is_alone = is_alone
        self._abandon = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        # Only the main thread can install handlers; in other threads the program handles signals.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            ends_with_others = error is not None and not self._is_alone and number == signal.SIGTERM
            signal.signal(number, signal.SIG_IGN if ends_with_others else handler)

    @contextlib.contextmanager
    def abandoning(self) -> Iterator[None]:
        """Raise StopRequested inside a with block as soon as a signal arrives."""
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
