"""Spans of the pieces of a text, and the word number of each piece."""

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
    """Remove white space at both ends of each span, except for spans of white space only.

    Args:
        text: text of the spans.
        spans: start and end (exclusive) of each piece, in characters.
    """
    return [_trim_span(text, start, stop) for start, stop in spans]


def _trim_span(text: str, start: int, stop: int) -> Span:
    piece = text[start:stop]
    if not piece or piece.isspace():
        return start, stop
    return start + len(piece) - len(piece.lstrip()), stop - len(piece) + len(piece.rstrip())


def word_numbers(text: str, spans: Sequence[Span], *, joint: str | None) -> Int64[ndarray, " pieces"]:
    """Return the word number of each piece, from 0.

    Args:
        text: text of the spans.
        spans: trimmed spans, in order.
        joint: suffix, such as "@@", that joins a word to the next one. None means no such suffix.
    """
    ends: list[int] = []
    for match in _WORD.finditer(text):
        if joint is not None and ends and text.endswith(joint, 0, ends[-1]):
            ends[-1] = match.end()
        else:
            ends.append(match.end())
    # White space after the last word belongs to this word; a text of only white space is one word.
    last = max(len(ends) - 1, 0)
    return np.array([min(bisect.bisect_right(ends, start), last) for start, _ in spans], dtype=np.int64)
