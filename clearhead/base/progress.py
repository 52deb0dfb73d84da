"""Messages and progress of long computations, sent to the display of the current context.

A command shows them on the terminal, a training on its panel or in its log. The default display shows nothing. Each
thread or task has its own display, so that calls in several threads do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Final, Literal, TypeVar

BatchT = TypeVar("BatchT", bound=Sized)

# Units of a count; "examples" are texts, lines or windows of batches.
Counted = Literal["examples", "texts", "tokens", "heads", "keys", "places", "tensors"]
# Function that gets the number of done items and the total.
Notify = Callable[[int, int], None]
# Seconds without a message or count after which a terminal shows the elapsed time.
QUIET_SECONDS: Final = 2.0


class Display:
    """Display of messages and counts that shows nothing; subclasses override its methods."""

    def message(self, text: str) -> None:
        """Show the user a message that is not a result."""

    def update(self, done: int, total: int, what: Counted) -> None:
        """Report progress: `done` of `total` items, counted in the unit `what`."""


SILENT: Final = Display()
_CURRENT: ContextVar[Display] = ContextVar("display", default=SILENT)


@contextmanager
def use_display(display: Display) -> Iterator[None]:
    """Send the messages and progress of a with block to a display."""
    token = _CURRENT.set(display)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def message(text: str) -> None:
    """Show the user a message that is not a result."""
    _CURRENT.get().message(text)


def update(done: int, total: int, what: Counted) -> None:
    """Report progress to the current display: `done` of `total` items."""
    _CURRENT.get().update(done, total, what)


def counter(what: Counted, notify: Notify | None = None) -> Notify:
    """Return the function that reports counts: `notify`, or `update` if it is None."""
    return notify or partial(update, what=what)


def report_batches(batches: Iterable[BatchT], total: int) -> Iterator[BatchT]:
    """Yield batches, and report the progress after each.

    Args:
        batches: batches of examples.
        total: the number of examples in all batches.
    """
    done = 0
    for batch in batches:
        yield batch
        done += len(batch)
        update(done, total, "examples")
