"""How far a long computation is, for whoever shows it: what is between them knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

BatchT = TypeVar("BatchT", bound=Sized)

Watcher = Callable[[int, int], None]
"""Receives how many are done, and how many there are."""

_WATCHER: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
_TOKEN_WATCHER: ContextVar[Watcher | None] = ContextVar("token_watcher", default=None)


@contextmanager
def watching_batches(watcher: Watcher) -> Iterator[None]:
    """Report each batch of predictions, searches, scores and measures to a function inside a with block."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def watched(batches: Iterable[BatchT], total: int) -> Iterator[BatchT]:
    """Yield batches, each reported as done when the next one is asked for.

    Args:
        batches: of examples.
        total: examples of all batches.
    """
    done = 0
    for batch in batches:
        yield batch
        done += len(batch)
        watcher = _WATCHER.get()
        if watcher is not None:
            watcher(done, total)


@contextmanager
def watching_tokens(watcher: Watcher) -> Iterator[None]:
    """Report each step of decoding to a function inside a with block."""
    token = _TOKEN_WATCHER.set(watcher)
    try:
        yield
    finally:
        _TOKEN_WATCHER.reset(token)


def token_generated(done: int, total: int) -> None:
    """Report that every text of a batch has one more token.

    Args:
        done: tokens of the longest text.
        total: tokens that it has at most.
    """
    watcher = _TOKEN_WATCHER.get()
    if watcher is not None:
        watcher(done, total)
