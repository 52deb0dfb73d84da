"""Signs of life of a command: a bar for counts on a terminal, and the seconds after two silent ones; lines in a log.

A command that is stopped says how much is done. rich's status line is not used for the seconds: while it is shown, rich
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

# Of a command that writes to a file: the first line of progress in its log, and the longest time until the next.
FIRST_LOG_SECONDS: Final = 5.0
LOG_SECONDS: Final = 60.0


@dataclass
class Bar(MessageDisplay):
    """Shows what is counted.

    Attributes:
        counts: which counts are shown.
        total: of all; None: not known.
        shown: on a terminal; None: elsewhere.
        log: writes lines of progress; None: nothing is logged.
        done: so many are done.
    """

    counts: Counted
    total: int | None
    shown: Progress | None
    log: ProgressLog | None = None
    done: int = 0

    def update(self, done: int, total: int, what: Counted) -> None:
        """Show how much is done, and of how much."""
        if what == self.counts:
            self.done, self.total = done, total
            self.show(done)

    def show(self, completed: int) -> None:
        """Show how much is computed; what counts as done stays the same."""
        if self.shown is not None:
            self.shown.update(self.shown.task_ids[0], completed=completed, total=self.total)
        if self.log is not None:
            self.log.show(completed, self.total)

    def skip(self, done: int) -> None:
        """Count what an earlier command has done, which says nothing about the speed of this one."""
        self.done = done
        if self.shown is not None:
            self.shown.reset(self.shown.task_ids[0], completed=done)
        if self.log is not None:
            self.log.num_skipped = done


@dataclass
class ProgressLog:
    """Writes lines of progress to stderr, the first after some seconds and then each minute.

    Attributes:
        name: the start of each line.
        unit: what is counted, in the plural.
        is_estimate: whether the total is a forecast.
        clock: gives the seconds.
        num_skipped: done by an earlier command.
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
        """Write how much is done, how fast, and how long the rest takes, if a line is due."""
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
    """Return a duration in its two largest units, such as 3 h 20 min."""
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
    """Show what is counted within a with block; a command that is stopped there says how much is done.

    Args:
        unit: what is counted, in the plural, as the user calls it.
        total: of all; None: not known.
        counts: which counts are shown.
        is_shown: whether there is a bar; there is one on a terminal only.
        stop_note: said of a stopped command, such as that no file was written.
        log: the start of the lines that are written where there is no bar; None means no lines.
        is_estimate: whether `total` is a forecast.
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
        """What is done in a second."""

        def render(self, task: progress.Task) -> Text:
            """Return the rate, or nothing before it is known."""
            return Text("" if task.speed is None else f"{task.speed:,.1f}/s")

    # Results on stdout may go anywhere, so only messages on stderr are written above the bar.
    return progress.Progress(
        progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(), RateColumn(),
        progress.TimeRemainingColumn(), console=Console(stderr=True), transient=True, refresh_per_second=2,
        redirect_stdout=False, speed_estimate_period=120,
    )  # fmt: skip


_ERASE: Final = "\x1b[K"
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

_CURRENT: ContextVar[IdleDisplay | None] = ContextVar("waiting", default=None)


class IdleDisplay:
    """Shows on a terminal for how long a command has written nothing; what it writes next takes that place.

    Nothing is shown in the middle of a line, so neither in a text that is streamed nor below a panel or a bar, which
    show by themselves that they are alive.

    Args:
        clock: gives the seconds.

    Attributes:
        is_paused: whether the command waits for the user.
        streams: the terminal's, by name; they note when they are written to.
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

    def show_if_idle(self) -> None:
        """Show for how long nothing was written, if that is long enough."""
        with self._lock:
            seconds = self._clock() - self._last
            is_free = bool(self.streams) and all(stream.is_whole for stream in self.streams.values())
            if seconds >= QUIET_SECONDS and is_free and not self.is_paused and not self._ended.is_set():
                self._is_shown = True
                # The cursor stays in front: what bypasses these streams is written over it.
                self._write(f"working, {seconds:.0f} s{_ERASE}\r")

    def watch(self) -> None:
        """Show each second what there is to show, until the end."""
        while not self._ended.wait(1.0):
            self.show_if_idle()

    def end(self) -> None:
        """Show nothing any more."""
        self._ended.set()
        with self._lock:
            self.erase()

    def _write(self, text: str) -> None:
        inner = self.streams["stderr"].inner
        inner.write(text)
        inner.flush()


class _WatchedStream:
    """A stream that tells when it is written to; all else is that of the stream inside."""

    def __init__(self, inner: Any, display: IdleDisplay) -> None:
        self.inner = inner
        self.is_whole = True
        self._display = display

    def write(self, text: str) -> int:
        """Write as the stream inside does."""
        with self._display.erase_and_write():
            if seen := _CONTROL.sub("", text):
                self.is_whole = seen[-1] in "\r\n"
            return int(self.inner.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@contextmanager
def show_idle_time(clock: Callable[[], float] = time.monotonic) -> Iterator[IdleDisplay]:
    """Show within a with block that a command works, where stderr is a terminal; of several processes the first does.

    The streams themselves note what is written, because not only commands write: also the bars and warnings of
    libraries, and other threads.

    Args:
        clock: gives the seconds.
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
    """Show nothing inside a with block: it is the user for whom the command waits."""
    display = _CURRENT.get() or IdleDisplay()
    display.is_paused = True
    try:
        yield
    finally:
        display.is_paused = False
        with display.erase_and_write():
            pass
