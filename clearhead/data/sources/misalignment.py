"""Where do two files stop belonging together? A guess from the lengths of their lines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64
from numpy import ndarray


def first_misaligned(longer: Sequence[str], shorter: Sequence[str]) -> int:
    """Return the line, counted from 1, at which two files of unequal length most likely lose each other.

    Assumes that one block of lines is missing in the shorter file. Translations of each other have lengths of a steady
    ratio; the answer is the place for the gap that makes the ratios, before it and after it, as steady as they can be.

    Args:
        longer: the lines of the longer file.
        shorter: the lines of the shorter file.

    Returns:
        The first line of `longer` that lacks its partner; len(shorter) + 1 where the surplus stands at the end.

    Source: the length-based cost follows Gale and Church 1993, with a median ratio in place of their fitted one.
    """
    surplus = len(longer) - len(shorter)
    long, short = _log_lengths(longer), _log_lengths(shorter)
    centre = float(np.median(long)) - float(np.median(short))
    before = np.abs(long[: len(short)] - short - centre)
    after = np.abs(long[surplus:] - short - centre)
    # cost[k] = lines before k paired straight across, lines from k on paired with those behind the gap
    cost = np.concatenate([[0.0], np.cumsum(before)]) + (after.sum() - np.concatenate([[0.0], np.cumsum(after)]))
    # The last of equal costs: a gap may as well stand behind lines that fit either way, and the end is the usual place.
    best = len(cost) - 1 - int(np.argmin(cost[::-1]))
    return best + 1


def _log_lengths(lines: Sequence[str]) -> Float64[ndarray, " lines"]:
    return np.log1p(np.fromiter(map(len, lines), dtype=np.float64, count=len(lines)))
