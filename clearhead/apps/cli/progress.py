"""Progress of commands: a bar or the seconds without output on a terminal, and lines of progress in a log.

A stopped command reports how much is done. rich's status line is not used for the seconds. While it is shown, rich
ends a line wherever streamed text is flushed, and wraps results at the width of the terminal.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from clearhead.apps.cli.console import MessageDisplay, print_message
from clearhead.apps.cli.stopping import Stopped
from clearhead.base.progress import QUIET_SECONDS, Counted, use_display

if TYPE_CHECKING:
    from rich.progress import Progress

# Seconds until the first line of progress in a log, and the longest time between two lines.
FIRST_LOG_SECONDS: Final = 5.0
LOG_SECONDS: Final = 60.0


@dataclass
class Bar(MessageDisplay):
    """Progress display that counts items in a bar on a terminal, or in lines of a log.

    Attributes:
        counts: the kind of items that the display counts.
        total: the number of all items. None means unknown.
        shown: the bar on a terminal. None means no bar.
        log: the log for lines of progress. None means no lines.
        done: the number of items that are done.
    """

    counts: Counted
    total: int | None
    shown: Progress | None
    log: ProgressLog | None = None
    done: int = 0

    def update(self, done: int, total: int, what: Counted) -> None:
        """Show the number of done items and the total."""
        if what == self.counts:
            self.done, self.total = done, total
            self.show(done)

    def show(self, completed: int) -> None:
        """Show a number of computed items without changing `done`."""
        if self.shown is not None:
            self.shown.update(self.shown.task_ids[0], completed=completed, total=self.total)
        if self.log is not None:
            self.log.show(completed, self.total)

    def skip(self, done: int) -> None:
        """Count items that an earlier command has done, without counting them for the speed."""
        self.done = done
        if self.shown is not None:
            self.shown.reset(self.shown.task_ids[0], completed=done)
        if self.log is not None:
            self.log.num_skipped = done


@dataclass
class ProgressLog:
    """Log that writes lines of progress to stderr, first after some seconds and then at least each minute.

    Attributes:
        name: the start of each line.
        unit: the name of the counted items, in the plural.
        is_estimate: True if the total is a forecast.
        clock: function that returns the time in seconds.
        num_skipped: the number of items that an earlier command has done.
    """

    name: str
    unit: str
    is_estimate: bool
    clock: Callable[[], float] = time.monotonic
    num_skipped: int = 0

    def __post_init__(self) -> None:
        self._start = self.clock()
        self._due = self._start + FIRST_LOG_SECONDS

    def show(self, completed: int, total: int | None) -> None:
        """Write a line with the progress, the speed and the remaining time, if one is due."""
        now = self.clock()
        if now < self._due:
            return
        elapsed = now - self._start
        self._due = now + min(elapsed, LOG_SECONDS)
        rate = (completed - self.num_skipped) / elapsed
        line = f"{self.name}{completed:,}"
        if total is not None:
            line += f" of {'about ' if self.is_estimate else ''}{max(total, completed):,}"
        line += f" {self.unit} are done, {rate:,.1f}/s"
        if total is not None and rate:
            line += f", {_duration(max(total - completed, 0) / rate)} left"
        print_message(line)


def _duration(seconds: float) -> str:
    """Return a duration as text in its two largest units, such as 3 h 20 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"


@contextmanager
def show_counts(
    unit: str,
    total: int | None = None,
    *,
    counts: Counted = "examples",
    is_shown: bool = True,
    stop_note: str = "",
    log: str | None = None,
    is_estimate: bool = False,
) -> Iterator[Bar]:
    """Show progress inside a with block; a command that is stopped there reports how much is done.

    Args:
        unit: the name of the counted items, in the plural, as shown to the user.
        total: the number of all items. None means unknown.
        counts: the kind of items to count.
        is_shown: False to show no bar; a bar is shown on a terminal only.
        stop_note: the end of the message of a stopped command, such as that no file was written.
        log: the start of the log lines that replace the bar. None means no lines.
        is_estimate: True if `total` is a forecast.
    """
    shown = _make_bar() if is_shown and sys.stderr.isatty() else None
    lines = None if log is None or shown is not None else ProgressLog(log, unit, is_estimate)
    bar = Bar(counts, total, shown, lines)
    if shown is not None:
        shown.add_task(unit, total=total)
    with use_display(bar), shown or nullcontext():
        try:
            yield bar
        except Stopped as stopped:
            about = "about " if is_estimate else ""
            of_all = "" if bar.total is None else f" of {about}{bar.total:,}"
            stopped.done = f"{bar.done:,}{of_all} {unit} are done{stop_note}"
            raise


def _make_bar() -> Progress:
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    class RateColumn(progress.ProgressColumn):
        """Column of a progress bar with the number of items per second."""

        def render(self, task: progress.Task) -> Text:
            """Return the rate as text, empty while it is unknown."""
            return Text("" if task.speed is None else f"{task.speed:,.1f}/s")

    # Only messages on stderr are written above the bar: results on stdout may go to a file or a pipe.
    return progress.Progress(
        progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(), RateColumn(),
        progress.TimeRemainingColumn(), console=Console(stderr=True), transient=True, refresh_per_second=2,
        redirect_stdout=False, speed_estimate_period=120,
    )  # fmt: skip


_ERASE: Final = "\x1b[K"
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

_CURRENT: ContextVar[IdleDisplay | None] = ContextVar("waiting", default=None)


class IdleDisplay:
    """Display of the seconds since the last output on a terminal; the next output replaces it.

    Nothing is shown in the middle of a line: neither in streamed text nor below a panel or a bar, which show activity
    themselves.

    Args:
        clock: function that returns the time in seconds.

    Attributes:
        is_paused: True while the command waits for the user.
        streams: the watched streams of the terminal by name, stdout and stderr.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_paused = False
        self._clock = clock
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._last = clock()
        self._is_shown = False
        self.streams: dict[str, _WatchedStream] = {}

    @contextmanager
    def erase_and_write(self) -> Iterator[None]:
        """Return a context manager for other output: erase the display first, and restart the count after."""
        with self._lock:
            self.erase()
            yield
            self._last = self._clock()

    def erase(self) -> None:
        """Erase the displayed seconds."""
        if self._is_shown:
            self._is_shown = False
            self._write(_ERASE)

    def show_if_idle(self) -> None:
        """Show the seconds since the last output, if there are at least `QUIET_SECONDS`."""
        with self._lock:
            seconds = self._clock() - self._last
            is_free = bool(self.streams) and all(stream.is_whole for stream in self.streams.values())
            if seconds >= QUIET_SECONDS and is_free and not self.is_paused and not self._ended.is_set():
                self._is_shown = True
                # The cursor stays at the start, so that output that bypasses these streams overwrites the display.
                self._write(f"working, {seconds:.0f} s{_ERASE}\r")

    def watch(self) -> None:
        """Update the display each second until the end."""
        while not self._ended.wait(1.0):
            self.show_if_idle()

    def end(self) -> None:
        """Stop the display and erase it."""
        self._ended.set()
        with self._lock:
            self.erase()

    def _write(self, text: str) -> None:
        inner = self.streams["stderr"].inner
        inner.write(text)
        inner.flush()


class _WatchedStream:
    """A wrapped output stream that reports each write to an idle display."""

    def __init__(self, inner: Any, display: IdleDisplay) -> None:
        self.inner = inner
        self.is_whole = True
        self._display = display

    def write(self, text: str) -> int:
        """Write to the wrapped stream."""
        with self._display.erase_and_write():
            if seen := _CONTROL.sub("", text):
                self.is_whole = seen[-1] in "\r\n"
            return int(self.inner.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@contextmanager
def show_idle_time(clock: Callable[[], float] = time.monotonic) -> Iterator[IdleDisplay]:
    """Show the seconds without output inside a with block, if stderr is a terminal and this is the first process.

    The output streams are wrapped, because bars and warnings of libraries and other threads write as well.

    Args:
        clock: function that returns the time in seconds.
    """
    display, is_first = IdleDisplay(clock), os.environ.get("RANK", "0") == "0"
    with ExitStack() as stack:
        if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb" and is_first:
            for name, redirect in (("stdout", redirect_stdout), ("stderr", redirect_stderr)):
                if getattr(sys, name).isatty():
                    display.streams[name] = _WatchedStream(getattr(sys, name), display)
                    stack.enter_context(redirect(display.streams[name]))
            threading.Thread(target=display.watch, daemon=True).start()
        token = _CURRENT.set(display)
        try:
            yield display
        finally:
            _CURRENT.reset(token)
            display.end()


@contextmanager
def pause_idle_time() -> Iterator[None]:
    """Pause the display of idle time inside a with block, while the command waits for the user."""
    display = _CURRENT.get() or IdleDisplay()
    display.is_paused = True
    try:
        yield
    finally:
        display.is_paused = False
        with display.erase_and_write():
            pass
