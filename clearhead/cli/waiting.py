"""A sign of life: on a terminal no command is silent for long."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final

QUIET_SECONDS: Final = 2.0
"""After so many seconds without output the terminal shows that the command works."""
_ERASE: Final = "\x1b[K"
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

_CURRENT: ContextVar[Waiting | None] = ContextVar("waiting", default=None)


class Waiting:
    """Shows on a terminal for how long a command has written nothing; what it writes next takes that place.

    Inside its with block stdout and stderr note when they are written to. Nothing is shown in the middle of a line, so
    neither in a text that is streamed nor below a panel or a bar, which show by themselves that they are alive.

    Args:
        clock: gives the seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_paused = False
        self._clock = clock
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._last = clock()
        self._is_shown = False
        self._streams: dict[str, _Noted] = {}

    def __enter__(self) -> Waiting:
        # Of several processes the first one writes.
        is_first = os.environ.get("RANK", "0") == "0"
        if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb" and is_first:
            names = [name for name in ("stdout", "stderr") if getattr(sys, name).isatty()]
            self._streams = {name: _Noted(getattr(sys, name), self) for name in names}
            for name, stream in self._streams.items():
                setattr(sys, name, stream)
            threading.Thread(target=self._watch, daemon=True).start()
        self._token = _CURRENT.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _CURRENT.reset(self._token)
        self._ended.set()
        with self._lock:
            self.erase()
            for name, stream in self._streams.items():
                if getattr(sys, name) is stream:
                    setattr(sys, name, stream.inner)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Erase what is shown, before something else is written."""
        with self._lock:
            self.erase()
            yield
            self._last = self._clock()

    def erase(self) -> None:
        """Erase what is shown."""
        if self._is_shown:
            self._is_shown = False
            self._write(_ERASE)

    def beat(self) -> None:
        """Show for how long nothing was written, if that is long enough."""
        with self._lock:
            seconds = self._clock() - self._last
            is_free = bool(self._streams) and all(stream.is_whole for stream in self._streams.values())
            if seconds >= QUIET_SECONDS and is_free and not self.is_paused and not self._ended.is_set():
                self._is_shown = True
                # The cursor stays in front: what bypasses these streams is written over it.
                self._write(f"working, {seconds:.0f} s{_ERASE}\r")

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            self.beat()

    def _write(self, text: str) -> None:
        inner = self._streams["stderr"].inner
        inner.write(text)
        inner.flush()


class _Noted:
    """A stream that tells when it is written to; all else is that of the stream inside."""

    def __init__(self, inner: Any, waiting: Waiting) -> None:
        self.inner = inner
        self.is_whole = True
        self._waiting = waiting

    def write(self, text: str) -> int:
        """Write as the stream inside does."""
        with self._waiting.writing():
            if seen := _CONTROL.sub("", text):
                self.is_whole = seen[-1] in "\r\n"
            return int(self.inner.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@contextmanager
def at_rest() -> Iterator[None]:
    """Show nothing inside a with block: it is the user for whom the command waits."""
    waiting = _CURRENT.get()
    if waiting is None:
        yield
        return
    waiting.is_paused = True
    try:
        yield
    finally:
        waiting.is_paused = False
        with waiting.writing():
            pass
