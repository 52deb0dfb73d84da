"""The difference between two rows, with the interval in which it lies by what their seeds show."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, variance
from typing import Final

import numpy as np

from clearhead.apps.compare.runs import Quality
from clearhead.apps.compare.table import Row
from clearhead.base.printing import Printed

LEVEL: Final = 0.95
"""The share of all comparisons whose interval holds the difference that more seeds would show."""
_POINTS: Final = 2001
_HALVINGS: Final = 60


@dataclass(frozen=True, repr=False)
class Difference(Printed):
    """The difference of the best validations of two rows, by Student's t.

    Where two seeds at least are in both rows, their differences seed by seed are one sample; else the rows are two
    samples with a variance each.

    Source: Student (1908), The probable error of a mean; Welch (1947), The generalization of 'Student's' problem.

    Attributes:
        row, reference: names of the rows; positive: the row has more.
        quality: which best validation.
        mean: the difference of the means.
        low, high: the ends of the interval; None: a row has one seed, so there is none.
        seeds: those that are paired; empty: the rows are two samples.
        counts: how many seeds of the row and of the reference it is computed from.
    """

    row: str
    reference: str
    quality: Quality
    mean: float
    low: float | None
    high: float | None
    seeds: tuple[int, ...]
    counts: tuple[int, int]

    @property
    def is_told_apart(self) -> bool | None:
        """Whether the seeds tell the two apart: zero is outside of the interval; None: there is none."""
        return None if self.low is None or self.high is None else not self.low <= 0.0 <= self.high


def difference_of(row: Row, reference: Row, quality: Quality) -> Difference | None:
    """Return the difference of a row from another one; None: one of them has no such validation."""
    ours, theirs = _by_seed(row, quality), _by_seed(reference, quality)
    if not ours or not theirs:
        return None
    seeds, reach = _paired(ours, theirs), None
    if seeds:
        changes = [ours[seed][0] - theirs[seed][0] for seed in seeds]
        mean = fmean(changes)
        counts = (len(changes), len(changes))
        reach = student_quantile(len(changes) - 1.0) * math.sqrt(variance(changes) / len(changes))
    else:
        first, second = (list(chain.from_iterable(runs.values())) for runs in (ours, theirs))
        mean = fmean(first) - fmean(second)
        counts = (len(first), len(second))
        reach = _reach_of_two(first, second)
    low, high = (None, None) if reach is None else (mean - reach, mean + reach)
    return Difference(row.name, reference.name, quality, mean, low, high, seeds, counts)


def differences_of(rows: Sequence[Row], incomparable: Mapping[Quality, Collection[str]]) -> tuple[Difference, ...]:
    """Return the differences of all rows from the first one.

    Args:
        rows: at least one.
        incomparable: names of the rows whose loss or score cannot be compared with that of the first one.
    """
    pairs = [(row, quality) for row in rows[1:] for quality in incomparable if row.name not in incomparable[quality]]
    every = (difference_of(row, rows[0], quality) for row, quality in pairs)
    return tuple(difference for difference in every if difference is not None)


def _by_seed(row: Row, quality: Quality) -> dict[int, list[float]]:
    values: dict[int, list[float]] = {}
    for run in row.runs:
        best = run.best(quality)
        if best is not None:
            values.setdefault(run.seed, []).append(best)
    return values


def _paired(ours: Mapping[int, Sequence[float]], theirs: Mapping[int, Sequence[float]]) -> tuple[int, ...]:
    """Return the seeds that both have; none where they are fewer than two, or one was trained twice."""
    seeds = tuple(sorted({*ours} & {*theirs}))
    is_clear = all(len(ours[seed]) == len(theirs[seed]) == 1 for seed in seeds)
    return seeds if len(seeds) >= 2 and is_clear else ()


def _reach_of_two(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return half of the interval of the difference of two means; None: a sample has one value."""
    if min(len(first), len(second)) < 2:
        return None
    errors = [variance(sample) / len(sample) for sample in (first, second)]
    total = sum(errors)
    if total == 0.0:
        return 0.0
    spent = sum(error**2 / (len(sample) - 1) for error, sample in zip(errors, (first, second), strict=True))
    return student_quantile(total**2 / spent) * math.sqrt(total)


def student_quantile(freedom: float, level: float = LEVEL) -> float:
    """Return how many standard errors an interval around a mean reaches to each side, by Student's t.

    With t = sqrt(n) tan(a) the probability within t is an integral of cos(a)^(n - 1), which has no singularity.

    Args:
        freedom: degrees of freedom, from 1; not a whole number for two samples.
        level: the probability within.
    """
    scale = 2 * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        angles = np.linspace(0.0, middle, _POINTS)
        heights = np.cos(angles) ** (freedom - 1)
        within = scale * middle * float(heights[:-1].mean() + heights[1:].mean()) / 2
        low, high = (middle, high) if within < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
