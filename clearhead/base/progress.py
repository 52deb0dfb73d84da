"""What there is to say about a long computation, and how far it is: one protocol for whoever shows it.

A command shows it on the terminal, a training on its panel or in its log, and by default nobody does. What computes
does not know who shows: that is known to the context, so that calls in several threads do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Final, Literal, TypeVar

BatchT = TypeVar("BatchT", bound=Sized)

# "examples" are those of batches: texts, lines or windows, as their caller calls them.
Counted = Literal["examples", "texts", "tokens", "heads", "keys", "places", "tensors"]
# Receives how many are done, and how many there are.
Notify = Callable[[int, int], None]
# After so many seconds without a sign of life a terminal shows for how long there was none.
QUIET_SECONDS: Final = 2.0


class Display:
    """Receives messages and counts and shows nothing; subclasses override what they show."""

    def message(self, text: str) -> None:
        """A message for the user."""

    def update(self, done: int, total: int, what: Counted) -> None:
        """So many are done, of so many."""


SILENT: Final = Display()
_CURRENT: ContextVar[Display] = ContextVar("display", default=SILENT)


@contextmanager
def use_display(display: Display) -> Iterator[None]:
    """Let a display show what is computed inside a with block."""
    token = _CURRENT.set(display)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def message(text: str) -> None:
    """Tell the user something that is not a result."""
    _CURRENT.get().message(text)


def update(done: int, total: int, what: Counted) -> None:
    """Report how many are done, and of how many."""
    _CURRENT.get().update(done, total, what)


def counter(what: Counted, notify: Notify | None = None) -> Notify:
    """Return the function to report counts to: the one that a caller gave, or else `update`."""
    return notify or partial(update, what=what)


def report_batches(batches: Iterable[BatchT], total: int) -> Iterator[BatchT]:
    """Yield batches, each reported as done when the next one is asked for.

    Args:
        batches: of examples.
        total: examples of all batches.
    """
    done = 0
    for batch in batches:
        yield batch
        done += len(batch)
        update(done, total, "examples")
