"""Metrics of predicted labels and numbers.

Shape suffixes: N examples, L labels, U different values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int64, Integer, Real
from numpy import ndarray


def accuracy(predicted_N: Integer[ndarray, " examples"], expected_N: Integer[ndarray, " examples"]) -> float:
    """Return the share of right predictions, 0 to 1.

    Args:
        predicted_N: the predicted label indices; at least one.
        expected_N: the right label indices.
    """
    return float(np.mean(predicted_N == expected_N))


def confusion_matrix(
    predicted_N: Integer[ndarray, " examples"], expected_N: Integer[ndarray, " examples"], *, num_labels: int
) -> Int64[ndarray, "labels labels"]:
    """Return the confusion matrix of counts; row = expected, column = predicted.

    Args:
        predicted_N: the predicted label indices, 0 to num_labels - 1.
        expected_N: the right label indices.
        num_labels: the number of labels, which is the number of rows and columns.
    """
    cells_N = expected_N.astype(np.int64) * num_labels + predicted_N
    return np.bincount(cells_N, minlength=num_labels * num_labels).reshape(num_labels, num_labels).astype(np.int64)


def f1_by_label(confusion_LL: Int64[ndarray, "labels labels"]) -> Float[ndarray, " labels"]:
    """Return the F1 of each label, 0 to 1; NaN for a label that was neither expected nor predicted.

    Args:
        confusion_LL: the confusion matrix; row = expected, column = predicted.
    """
    return _f1(np.diag(confusion_LL), confusion_LL.sum(0), confusion_LL.sum(1))


def macro_f1(confusion_LL: Int64[ndarray, "labels labels"]) -> float:
    """Return the mean F1 of the labels that were expected or predicted at least once, 0 to 1.

    Args:
        confusion_LL: the confusion matrix; row = expected, column = predicted; not all zero.
    """
    return float(np.nanmean(f1_by_label(confusion_LL)))


@dataclass(frozen=True)
class MultiLabelScores:
    """Scores of multi-label predictions, each 0 to 1.

    Args:
        micro_f1: the F1 over all decisions together.
        macro_f1: the mean F1 of the labels that were expected or predicted at least once.
        exact: the share of examples whose labels are all right.
    """

    micro_f1: float
    macro_f1: float
    exact: float


def multi_label_scores(
    predicted_NL: Bool[ndarray, "examples labels"], expected_NL: Bool[ndarray, "examples labels"]
) -> MultiLabelScores:
    """Return the scores of multi-label predictions; F1 is 1 if nothing was expected and nothing predicted.

    Args:
        predicted_NL: the predicted labels, True for each label that is predicted.
        expected_NL: the expected labels, True for each label that is expected.
    """
    correct_L, predicted_L, expected_L = (
        is_there_NL.sum(0) for is_there_NL in (predicted_NL & expected_NL, predicted_NL, expected_NL)
    )
    by_label_L = _f1(correct_L, predicted_L, expected_L)
    total = int(predicted_L.sum() + expected_L.sum())
    return MultiLabelScores(
        micro_f1=2 * int(correct_L.sum()) / total if total else 1.0,
        macro_f1=float(np.nanmean(by_label_L)) if total else 1.0,
        exact=float(np.mean((predicted_NL == expected_NL).all(1))),
    )


def _f1(
    correct_L: Integer[ndarray, " labels"],
    predicted_L: Integer[ndarray, " labels"],
    expected_L: Integer[ndarray, " labels"],
) -> Float[ndarray, " labels"]:
    """Return F1 = 2 correct / (predicted + expected) from the counts of correct, predicted and expected labels."""
    total_L = predicted_L + expected_L
    return np.where(total_L > 0, 2.0 * correct_L / np.maximum(total_L, 1), np.nan)


def mean_squared_error(predicted_N: Real[ndarray, " examples"], expected_N: Real[ndarray, " examples"]) -> float:
    """Return the mean squared difference of predicted and expected numbers; needs at least one example."""
    return float(np.mean(np.square(np.asarray(predicted_N, np.float64) - np.asarray(expected_N, np.float64))))


def pearson(first_N: Real[ndarray, " examples"], second_N: Real[ndarray, " examples"]) -> float:
    """Return the linear correlation of two number sequences, -1 to 1; 0 if one of them is constant.

    Args:
        first_N, second_N: the two numbers of each example.
    """
    first, second = (np.asarray(side, np.float64) for side in (first_N, second_N))
    if len(first) < 2 or np.all(first == first[0]) or np.all(second == second[0]):
        return 0.0
    # Scale before squaring, so that tiny numbers do not vanish and huge ones do not overflow.
    first, second = (side - side.mean() for side in (first, second))
    first, second = (side / np.abs(side).max() for side in (first, second))
    ratio = float(first @ second) / float(np.sqrt(first @ first) * np.sqrt(second @ second))
    return min(1.0, max(-1.0, ratio))


def spearman(first_N: Real[ndarray, " examples"], second_N: Real[ndarray, " examples"]) -> float:
    """Return the rank correlation of two number sequences, -1 to 1; equal numbers get the mean of their ranks.

    Args:
        first_N, second_N: the two numbers of each example.

    Source: Spearman 1904; ties as in Kendall 1945.
    """
    return pearson(_ranks(first_N), _ranks(second_N))


def _ranks(values_N: Real[ndarray, " examples"]) -> Float[ndarray, " examples"]:
    _, place_N, count_U = np.unique(np.asarray(values_N), return_inverse=True, return_counts=True)
    last_U = np.cumsum(count_U)
    return (last_U - (count_U - 1) / 2)[place_N]


@dataclass(frozen=True)
class F1Counts:
    """Counts of a label or an entity type: expected, predicted, and correct (both)."""

    expected: int = 0
    predicted: int = 0
    correct: int = 0

    @property
    def precision(self) -> float:
        """The share of predictions that are right, 0 to 1; 0 if there are no predictions."""
        return self.correct / max(self.predicted, 1)

    @property
    def recall(self) -> float:
        """The share of expected labels that were predicted, 0 to 1; 0 if nothing was expected."""
        return self.correct / max(self.expected, 1)

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        return 2 * self.correct / max(self.expected + self.predicted, 1)

    def record(self, *, undefined: float | None = 0.0) -> dict[str, float | int | None]:
        """Return precision, recall, F1 and the expected count; `undefined` replaces ratios without a denominator."""
        return {
            "precision": self.precision if self.predicted else undefined,
            "recall": self.recall if self.expected else undefined,
            "f1": self.f1 if self.expected + self.predicted else undefined,
            "count": self.expected,
        }
