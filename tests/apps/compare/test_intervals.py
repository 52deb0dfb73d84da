"""The interval of a difference: the values of the literature, pairs, two samples, and what has no interval."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import pytest

from clearhead.apps.compare.report import (
    RowDifference,
    compare_runs,
    compute_difference,
    compute_differences,
    student_quantile,
)
from clearhead.apps.compare.table import ComparisonRow, read_rows
from tests.apps.compare.run_maker import RunMaker


def make_rows(folder: Path, *bests: Mapping[int, float]) -> list[ComparisonRow]:
    """Return rows named a, b, ... with one run for each seed, and the given best losses."""
    paths = [
        RunMaker(overrides=[f"model.dropout=0.{number + 1}"], validations=[(40, best, None)]).write(
            folder / f"{'ab'[number]}-{seed}", seed=seed
        )
        for number, by_seed in enumerate(bests)
        for seed, best in by_seed.items()
    ]
    return read_rows(paths)


def difference(folder: Path, *bests: Mapping[int, float]) -> RowDifference:
    reference, row = make_rows(folder, *bests)
    row_difference = compute_difference(row, reference, "loss")
    assert row_difference is not None
    return row_difference


@pytest.mark.parametrize(
    ("freedom", "level", "expected"),
    [
        (1.0, 0.95, 12.7062),
        (2.0, 0.95, 4.30265),
        (9.0, 0.95, 2.26216),
        (30.0, 0.95, 2.04227),
        (4.0, 0.99, 4.60409),
        (300.0, 0.95, 1.96790),
    ],
)
def test_quantiles_are_those_of_the_tables(freedom: float, level: float, expected: float) -> None:
    assert student_quantile(freedom, level) == pytest.approx(expected, rel=1e-5)


def test_seeds_that_both_have_are_paired(tmp_path: Path) -> None:
    row_difference = difference(tmp_path, {1: 2.0, 2: 3.0, 3: 7.0}, {3: 7.5, 1: 2.3, 2: 3.4, 4: 90.0})
    # 0.3, 0.4, 0.5: mean 0.4, standard error 0.1 / sqrt(3)
    assert row_difference.seeds == (1, 2, 3) and row_difference.counts == (3, 3)
    assert (row_difference.mean, row_difference.low, row_difference.high) == pytest.approx(
        (0.4, 0.15159, 0.64841), abs=1e-5
    )
    assert row_difference.is_told_apart


def test_other_seeds_are_two_samples(tmp_path: Path) -> None:
    row_difference = difference(tmp_path, {1: 1.0, 2: 2.0, 3: 3.0}, {4: 5.0, 5: 9.0})
    # Welch: variances 1 / 3 and 8 / 2, so 1.1698 degrees of freedom
    assert row_difference.seeds == () and row_difference.counts == (2, 3)
    error, freedom = (1 / 3 + 4) ** 0.5, (1 / 3 + 4) ** 2 / ((1 / 3) ** 2 / 2 + 4**2)
    reach = student_quantile(freedom) * error
    assert (row_difference.mean, row_difference.low, row_difference.high) == pytest.approx((5.0, 5 - reach, 5 + reach))
    assert row_difference.is_told_apart is False


@pytest.mark.parametrize("seeds", [{1: 3.0}, {4: 3.0}])
def test_one_seed_gives_no_interval(tmp_path: Path, seeds: dict[int, float]) -> None:
    row_difference = difference(tmp_path, {1: 1.0, 2: 2.0}, seeds)
    assert (row_difference.low, row_difference.high, row_difference.is_told_apart) == (None, None, None)
    assert row_difference.mean == pytest.approx(1.5)


def test_the_interval_holds_the_true_difference_as_often_as_it_says() -> None:
    draws, reach, hits = random.Random(5), student_quantile(2.0), 0
    for _ in range(2000):
        sample = [draws.gauss(0.5, 2.0) for _ in range(3)]
        deviation = (sum((value - fmean(sample)) ** 2 for value in sample) / 2) ** 0.5
        hits += abs(fmean(sample) - 0.5) <= reach * deviation / 3**0.5
    assert hits / 2000 == pytest.approx(0.95, abs=0.015)


def test_what_cannot_be_compared_has_no_difference(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, {1: 1.0, 2: 2.0}, {1: 1.5, 2: 2.5})
    assert compute_differences(rows, {"loss": {"b"}, "score": set()}) == ()


@pytest.mark.parametrize(
    ("bests", "expected"),
    [
        (
            (2.1, 3.2, 4.3),
            "best loss +0.2000 (95% interval -0.0484 to +0.4484, 3 paired seeds): cannot be told",
        ),
        ((2.1, 3.1, 4.11), "best loss +0.1033 (95% interval +0.0890 to +0.1177, 3 paired seeds)"),
    ],
)
def test_the_comparison_says_it_in_a_sentence(tmp_path: Path, bests: tuple[float, ...], expected: str) -> None:
    rows = make_rows(tmp_path, {1: 2.0, 2: 3.0, 3: 4.0}, dict(zip((1, 2, 3), bests, strict=True)))
    compared = compare_runs([run.path for row in rows for run in row.runs])
    (line,) = [line for line in compared.lines() if line.startswith("b against a")]
    assert line.startswith(f"b against a: {expected}") and line.endswith("seeds" if "told" in expected else "seeds)")
    assert str(compared).split("\n") == compared.lines()
    (record,) = compared.record()["differences"]
    assert record["told_apart"] is ("told" not in expected) and record["seeds"] == (1, 2, 3)
