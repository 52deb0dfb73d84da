"""Scores against independent computations: counted by hand, by another algorithm, or by fractions."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from clearhead.tasks.evaluate.metrics import (
    accuracy,
    confusion_matrix,
    f1_by_label,
    macro_f1,
    mean_squared_error,
    multi_label_scores,
    pearson,
    spearman,
)


def classes(count: int, num_labels: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, num_labels, count)


@pytest.mark.parametrize("num_labels", [2, 5, 11])
def test_classes_against_plain_counting(num_labels: int) -> None:
    predicted, expected = classes(97, num_labels, 1), classes(97, num_labels, 2)
    pairs = list(zip(expected.tolist(), predicted.tolist(), strict=True))
    matrix = confusion_matrix(predicted, expected, num_labels=num_labels)
    assert matrix.tolist() == [
        [pairs.count((row, column)) for column in range(num_labels)] for row in range(num_labels)
    ]
    assert accuracy(predicted, expected) == pytest.approx(sum(left == right for left, right in pairs) / 97)
    by_label = []
    for label in range(num_labels):
        hits = pairs.count((label, label))
        precision = Fraction(hits, max(1, sum(guess == label for _, guess in pairs)))
        recall = Fraction(hits, max(1, sum(true == label for true, _ in pairs)))
        by_label.append(float(2 * precision * recall / (precision + recall)) if hits else 0.0)
    assert f1_by_label(matrix) == pytest.approx(by_label)
    assert macro_f1(matrix) == pytest.approx(sum(by_label) / num_labels)


def test_a_class_that_never_occurs_does_not_count() -> None:
    matrix = confusion_matrix(np.array([0, 0, 2]), np.array([0, 2, 2]), num_labels=4)
    assert [math.isnan(value) for value in f1_by_label(matrix)] == [False, True, False, True]
    assert macro_f1(matrix) == pytest.approx((2 / 3 + 2 / 3) / 2)


def test_a_class_that_is_never_met_counts_as_zero() -> None:
    matrix = confusion_matrix(np.array([0, 0, 0]), np.array([0, 0, 1]), num_labels=2)
    assert macro_f1(matrix) == pytest.approx((0.8 + 0) / 2)


def test_several_labels_against_plain_counting() -> None:
    draw = np.random.default_rng(3)
    predicted, expected = draw.random((31, 7)) < 0.3, draw.random((31, 7)) < 0.4
    predicted[:, 4] = expected[:, 4] = False
    cells = [(bool(p), bool(e), label) for p_row, e_row in zip(predicted, expected, strict=True)
             for label, (p, e) in enumerate(zip(p_row, e_row, strict=True))]  # fmt: skip

    def f1(labels: set[int]) -> float:
        true_positive = sum(p and e for p, e, label in cells if label in labels)
        wrong = sum(p != e for p, e, label in cells if label in labels)
        return 2 * true_positive / (2 * true_positive + wrong)

    scores = multi_label_scores(predicted, expected)
    assert scores.micro_f1 == pytest.approx(f1(set(range(7))))
    assert scores.macro_f1 == pytest.approx(sum(f1({label}) for label in (0, 1, 2, 3, 5, 6)) / 6)
    assert scores.exact == pytest.approx(sum(list(p) == list(e) for p, e in zip(predicted, expected, strict=True)) / 31)


def test_no_label_anywhere_is_met() -> None:
    nothing = np.zeros((3, 2), dtype=bool)
    scores = multi_label_scores(nothing, nothing)
    assert (scores.micro_f1, scores.macro_f1, scores.exact) == (1.0, 1.0, 1.0)
    assert multi_label_scores(~nothing, nothing).micro_f1 == 0.0


def ranks(values: list[float]) -> list[Fraction]:
    """The mean place of a value among all orders of the equal ones: half a place for each equal other."""
    return [
        1 + sum(other < value for other in values) + Fraction(sum(other == value for other in values) - 1, 2)
        for value in values
    ]


def correlation(first: list[Fraction], second: list[Fraction]) -> float:
    """From the sums over all pairs of examples: no mean is ever subtracted."""
    pairs = [(left, right) for left in range(len(first)) for right in range(left)]
    product = sum((first[i] - first[j]) * (second[i] - second[j]) for i, j in pairs)
    squares = [sum((side[i] - side[j]) ** 2 for i, j in pairs) for side in (first, second)]
    return float(product) / math.sqrt(squares[0] * squares[1])


@pytest.mark.parametrize("levels", [3, 7, 1000])
def test_correlations_against_sums_over_pairs(levels: int) -> None:
    draw = random.Random(levels)
    first = [draw.randrange(levels) / 8 for _ in range(29)]
    second = [value + draw.randrange(levels) / 16 for value in first]
    exact = [[Fraction(value) for value in side] for side in (first, second)]
    assert pearson(np.array(first), np.array(second)) == pytest.approx(correlation(*exact), abs=1e-12)
    ranked = correlation(ranks(first), ranks(second))
    assert spearman(np.array(first), np.array(second)) == pytest.approx(ranked, abs=1e-12)


def test_spearman_sees_the_order_only() -> None:
    values = np.random.default_rng(5).normal(size=41)
    others = values + np.random.default_rng(6).normal(size=41)
    assert spearman(np.exp(values), others) == pytest.approx(spearman(values, others))
    assert spearman(values, np.exp(values)) == pytest.approx(1.0)
    assert spearman(values, -values) == pytest.approx(-1.0)


def test_what_does_not_vary_correlates_with_nothing() -> None:
    values = np.arange(5.0)
    assert spearman(np.ones(5), values) == pearson(values, np.full(5, 0.1)) == pearson(values[:1], values[:1]) == 0.0


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_correlation_of_extreme_numbers(scale: float) -> None:
    values = np.array([0.0, 1.0, 3.0, 2.0])
    assert pearson(values * scale, values) == pytest.approx(1.0)


def test_mean_squared_error_by_hand() -> None:
    assert mean_squared_error(np.array([1.0, 2.0, 4.0], np.float32), np.array([1, 0, 1])) == pytest.approx((4 + 9) / 3)
