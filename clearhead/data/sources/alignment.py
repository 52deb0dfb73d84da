"""Where two files that belong together line by line lose their alignment, by the lengths of their lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from clearhead.base.errors import json_text


def misalignment(first: Path, lines: Sequence[str], second: Path, others: Sequence[str]) -> str:
    """Describe which line looks like the first one without its partner."""
    path, longer, shorter = (first, lines, others) if len(lines) > len(others) else (second, others, lines)
    line = first_misaligned(longer, shorter)
    if line > len(shorter):
        return f"{path}:{line} and what follows has no partner, or the other file was cut short"
    return (
        f"by the lengths of the lines the first that looks wrong is {path}:{line} "
        f"({json_text(longer[line - 1])} beside {json_text(shorter[line - 1])})"
    )


def first_misaligned(longer: Sequence[str], shorter: Sequence[str]) -> int:
    """Return the line, counted from 1, at which two files of unequal length most likely lose their alignment.

    Assumes that one block of lines is missing in the shorter file. Translations of each other have a steady ratio of
    lengths; the gap is put where the ratios before it and after it are as steady as possible.

    Args:
        longer: the lines of the longer file.
        shorter: the lines of the shorter file.

    Returns:
        The first line of `longer` that lacks its partner; len(shorter) + 1 if the surplus is at the end.

    Source: the length-based cost follows Gale and Church 1993, with a median ratio in place of their fitted one.
    """
    surplus = len(longer) - len(shorter)
    long, short = _log_lengths(longer), _log_lengths(shorter)
    centre = float(np.median(long)) - float(np.median(short))
    before = np.abs(long[: len(short)] - short - centre)
    after = np.abs(long[surplus:] - short - centre)
    # cost[k] = lines before k paired straight across, lines from k on paired with those behind the gap
    cost = np.concatenate([[0.0], np.cumsum(before)]) + (after.sum() - np.concatenate([[0.0], np.cumsum(after)]))
    # The last of equal costs: a gap may follow lines that fit either way, and the end is the usual place.
    best = len(cost) - 1 - int(np.argmin(cost[::-1]))
    return best + 1


def _log_lengths(lines: Sequence[str]) -> Float64[ndarray, " lines"]:
    return np.log1p(np.fromiter(map(len, lines), dtype=np.float64, count=len(lines)))
