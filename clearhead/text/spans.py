"""Where the pieces of a text stand in it, and which word each belongs to."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

Span = tuple[int, int]

_WORD = re.compile(r"\S+")


def trim_spans(text: str, spans: Sequence[Span]) -> list[Span]:
    """Leave out the white space at both ends of each span that holds something else.

    Args:
        text: the text that the spans are places in.
        spans: for each piece the place of its first character and the place behind its last one.
    """
    return [_trim_span(text, start, stop) for start, stop in spans]


def _trim_span(text: str, start: int, stop: int) -> Span:
    piece = text[start:stop]
    if not piece or piece.isspace():
        return start, stop
    return start + len(piece) - len(piece.lstrip()), stop - len(piece) + len(piece.rstrip())


def word_numbers(text: str, spans: Sequence[Span], *, joint: str | None) -> Int64[ndarray, " pieces"]:
    """Return the number of the word that each piece belongs to, counted from 0.

    Args:
        text: the text that the spans are places in.
        spans: trimmed spans, in order.
        joint: what, at the end of one word, makes the next one a part of it; None: nothing does.
    """
    ends: list[int] = []
    for match in _WORD.finditer(text):
        if joint is not None and ends and text.endswith(joint, 0, ends[-1]):
            ends[-1] = match.end()
        else:
            ends.append(match.end())
    # White space behind the last word belongs to it; a text of white space alone is one word.
    last = max(len(ends) - 1, 0)
    return np.array([min(bisect.bisect_right(ends, start), last) for start, _ in spans], dtype=np.int64)
