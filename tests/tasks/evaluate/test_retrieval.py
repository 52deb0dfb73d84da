"""Recall of embeddings equals its definition, which sorts all candidates of each query."""

from __future__ import annotations

import numpy as np
import pytest

from clearhead.base.errors import InputError
from clearhead.tasks.evaluate.retrieval import Recall, recall_at


def unit(seed: int, count: int = 31) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(count, 5)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def sorted_recall(questions: np.ndarray, answers: np.ndarray, k: int, groups: list[int]) -> float:
    """Return the recall by sorting all answers of each question, as it is defined."""
    hits = 0
    for row, question in enumerate(questions):
        order = sorted(range(len(answers)), key=lambda index: -float(question @ answers[index]))
        hits += any(groups[index] == groups[row] for index in order[:k])
    return hits / len(questions)


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("entries", [1, 100, 2**24])
@pytest.mark.parametrize("grouped", [False, True])
def test_recall_is_what_sorting_finds(monkeypatch: pytest.MonkeyPatch, k: int, entries: int, grouped: bool) -> None:
    monkeypatch.setattr("clearhead.tasks.evaluate.retrieval._CHUNK_ENTRIES", entries)
    first = unit(1)
    second = first + 0.5 * unit(2)
    second /= np.linalg.norm(second, axis=1, keepdims=True)
    groups = [row // 2 for row in range(31)] if grouped else list(range(31))
    actual = recall_at(first, second, k, groups=np.array(groups) if grouped else None)
    assert actual == Recall(sorted_recall(first, second, k, groups), sorted_recall(second, first, k, groups))
    assert actual.mean == (actual.forward + actual.backward) / 2
    assert 0 < actual.mean <= 1


def test_recall_has_two_directions() -> None:
    """Each first text finds its partner, but the first of the second texts is nearer to another."""
    similarity_33 = np.array([[0.5, 0.4, 0.3], [0.6, 0.7, 0.2], [0.1, 0.2, 0.8]], dtype=np.float32)
    first, second = np.eye(3, dtype=np.float32), np.ascontiguousarray(similarity_33.T)
    assert recall_at(first, second) == Recall(1.0, 2 / 3)
    assert recall_at(second, first) == Recall(2 / 3, 1.0)
    assert recall_at(first, second, 2) == Recall(1.0, 1.0)


def test_equal_vectors_find_nothing() -> None:
    same = np.ones((7, 1), dtype=np.float32)
    assert recall_at(same, same) == Recall(0.0, 0.0)
    assert recall_at(same, same, 7) == Recall(1.0, 1.0)
    assert recall_at(same, same, groups=np.zeros(7, dtype=np.int64)) == Recall(1.0, 1.0)


def test_recall_says_what_it_needs() -> None:
    with pytest.raises(InputError, match="k must be at least 1, got 0"):
        recall_at(unit(1), unit(2), 0)
    with pytest.raises(InputError, match="31 first texts but 30"):
        recall_at(unit(1), unit(2, 30))
    with pytest.raises(InputError, match="no pairs"):
        recall_at(unit(1, 0), unit(2, 0))
