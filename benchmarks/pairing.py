"""Ratio of two sides that took turns, with its 95 % interval. Imports only the standard library.

The interval of the median is from order statistics. It is exact for any distribution, and one slow turn does not widen
it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of some values."""

    num: int
    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of figures.

        Args:
            values: the figures, at least one.
        """
        return cls(len(values), statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:,.4g} ({self.least:,.4g} to {self.most:,.4g}, n = {self.num})"


@dataclass(frozen=True)
class Ratio:
    """Ratio of two sides by pairing their turns.

    Args:
        num: the number of pairs.
        median: the median of the pairs' ratios.
        low, high: the bounds of the 95 % interval of the median. None means fewer than six pairs.
    """

    num: int
    median: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> Ratio:
        """Return the ratio first / second of figures from the same turns.

        Args:
            first, second: one figure per turn, in the order of the turns.

        Raises:
            ValueError: the sides have different numbers of turns, or none.
        """
        ratios = sorted(first_seconds / other for first_seconds, other in zip(first, second, strict=True))
        rank = interval_rank(len(ratios))
        low, high = (None, None) if rank is None else (ratios[rank], ratios[-1 - rank])
        return cls(len(ratios), statistics.median(ratios), low, high)

    @property
    def verdict(self) -> str:
        """Verdict on the ratio: larger, smaller, or no difference if the interval contains 1."""
        if self.low is None or self.high is None or self.low <= 1 <= self.high:
            return "no difference shown"
        return "larger" if self.low > 1 else "smaller"

    def falls_short(self, least: float) -> bool:
        """Return whether the whole interval lies below a bound."""
        return self.high is not None and self.high < least

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.median:.3f} (n = {self.num}: too few for an interval)"
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def interval_rank(num: int) -> int | None:
    """Return the number of values on each side that lie outside the 95 % interval of the median.

    Args:
        num: the number of values.

    Returns:
        The largest number for which the interval contains the median with 95 % probability; None with fewer than six
        values.
    """
    outside, rank = 0.0, None
    for number in range(num // 2):
        outside += 2 * math.comb(num, number) / 2**num
        if outside > 1 - CONFIDENCE:
            break
        rank = number
    return rank
