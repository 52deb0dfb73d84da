"""How far a command is: a bar with rate and time left on a terminal, and what is done when the command is stopped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clearhead.apps.cli.console import MessageDisplay
from clearhead.apps.cli.stopping import Stopped
from clearhead.base.progress import Counted, shown_by

if TYPE_CHECKING:
    from rich.progress import Progress


@dataclass
class Bar(MessageDisplay):
    """Shows what is counted.

    Attributes:
        counts: which counts are shown.
        total: of all; None: not known.
        shown: on a terminal; None: elsewhere.
        done: so many are done.
    """

    counts: Counted
    total: int | None
    shown: Progress | None
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


@contextmanager
def counting(
    unit: str, total: int | None = None, *, counts: Counted = "examples", is_shown: bool = True, kept: str = ""
) -> Iterator[Bar]:
    """Show what is counted within a with block; a command that is stopped there says how much is done.

    Args:
        unit: what is counted, in the plural, as the user calls it.
        total: of all; None: not known.
        counts: which counts are shown.
        is_shown: whether there is a bar; there is one on a terminal only.
        kept: said of a stopped command, such as that no file was written.
    """
    shown = _columns() if is_shown and sys.stderr.isatty() else None
    bar = Bar(counts, total, shown)
    if shown is not None:
        shown.add_task(unit, total=total)
    with shown_by(bar), shown or nullcontext():
        try:
            yield bar
        except Stopped as stopped:
            of_all = "" if bar.total is None else f" of {bar.total:,}"
            stopped.done = f"{bar.done:,}{of_all} {unit} are done{kept}"
            raise


def _columns() -> Progress:
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
