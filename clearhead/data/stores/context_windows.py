"""Overlapping windows of a context that is longer than what a model reads beside a question."""

from __future__ import annotations

from clearhead.errors import InputError

# In tokens, as models that answer questions are trained: a longer context is read in windows that overlap.
WINDOW, OVERLAP = 384, 128


def context_windows(num_question: int, num_context: int, *, longest: int, num_special: int) -> list[range]:
    """Return the tokens of each window: as many as fit beside the question.

    Neighbours share `OVERLAP` tokens, or half of a shorter window; whatever is at most one token longer than that is
    whole in one of them.

    Args:
        num_question, num_context: tokens of the question, and of the context.
        longest: tokens that the model reads at once, special ones included.
        num_special: special tokens around a pair.

    Raises:
        InputError: the question leaves no room.
    """
    room = longest - num_question - num_special
    if room < 2:
        raise InputError(
            f"the question has {num_question} tokens, and {longest} are read together with the text; shorten it"
        )
    # A long question shortens the overlap.
    overlap = min(OVERLAP, longest // 2, room // 2)
    windows = [range(first, min(first + room, num_context)) for first in range(0, num_context, room - overlap)]
    return windows[: [window.stop for window in windows].index(num_context) + 1]
