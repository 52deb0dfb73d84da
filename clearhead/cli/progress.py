"""How far a command is: a bar with rate and time left on a terminal, and what is done when the command is stopped."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from clearhead.cli.stopping import Stopped

if TYPE_CHECKING:
    from rich import progress


class Progress:
    """Counts what is done within its with block; a command that is stopped there says how much.

    Args:
        unit: what is counted, in the plural.
        total: of all; None: not known.
        is_shown: whether there is a bar; there is one on a terminal only.
        kept: said of a stopped command, such as that no file was written.
    """

    def __init__(self, unit: str, total: int | None = None, *, is_shown: bool = True, kept: str = "") -> None:
        self.unit = unit
        self.done = 0
        self.total = total
        self.kept = kept
        self._bar: progress.Progress | None = None
        self._is_shown = is_shown and sys.stderr.isatty()

    def __enter__(self) -> Progress:
        if self._is_shown:
            self._bar = _bar()
            self._bar.add_task(self.unit, total=self.total)
            self._bar.start()
        return self

    def update(self, done: int, total: int | None) -> None:
        """Show how much is done, and of how much."""
        self.done, self.total = done, total
        self.show(done)

    def show(self, completed: int) -> None:
        """Show how much is computed; what counts as done stays the same."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=completed, total=self.total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if isinstance(error, Stopped):
            of_all = "" if self.total is None else f" of {self.total:,}"
            error.done = f"{self.done:,}{of_all} {self.unit} are done{self.kept}"


def _bar() -> progress.Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class RateColumn(ProgressColumn):
        """What is done in a second."""

        def render(self, task: Task) -> Text:
            """Return the rate, or nothing before it is known."""
            return Text("" if task.speed is None else f"{task.speed:,.1f}/s")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), RateColumn(), TimeRemainingColumn())
    # Results on stdout may go anywhere, so only messages on stderr are written above the bar.
    return Progress(
        *columns, console=Console(stderr=True), transient=True, refresh_per_second=2, redirect_stdout=False,
        speed_estimate_period=120,
    )  # fmt: skip
