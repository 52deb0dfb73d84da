"""Retrieval metric for embeddings: recall at k, in both directions.

Shape suffixes: N pairs, D width of a vector, C rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Int64
from numpy import ndarray

from clearhead.base.errors import InputError

# Similarities per chunk: 64 MiB in float32, for any number of pairs.
_CHUNK_ENTRIES = 2**24


@dataclass(frozen=True)
class Recall:
    """Recall at k: the share of texts whose partner is among the k most similar texts of the other side, 0 to 1.

    Args:
        forward: the share of first texts that find their partner among the second texts.
        backward: the share of second texts that find their partner among the first texts.
    """

    forward: float
    backward: float

    @property
    def mean(self) -> float:
        """The mean of the forward and the backward recall."""
        return (self.forward + self.backward) / 2


def recall_at(
    first_ND: Float32[ndarray, "pairs width"],
    second_ND: Float32[ndarray, "second_texts width"],
    k: int = 1,
    *,
    groups: Int64[ndarray, " pairs"] | None = None,
) -> Recall:
    """Return the share of texts whose partner is among the k most similar texts of the other side.

    Ties count against the model, so equal vectors for all texts score 0.

    Args:
        first_ND: the vectors of the first texts, of length 1; their dot products are the similarities.
        second_ND: the vectors of their partners, row by row.
        k: the number of most similar texts to look at, at least 1.
        groups: the group number of each pair; any text of the same group counts as right. None means a group
            for each pair.

    Raises:
        InputError: k is not positive, the counts differ, or there are no pairs.
    """
    if k < 1:
        raise InputError(f"k must be at least 1, got {k}")
    check_pairs(first_ND, second_ND)
    if not len(first_ND):
        raise InputError("got no pairs to measure recall on; give at least one pair")
    groups_N = np.arange(len(first_ND)) if groups is None else groups
    return Recall(_one_way_recall(first_ND, second_ND, k, groups_N), _one_way_recall(second_ND, first_ND, k, groups_N))


def _one_way_recall(
    queries_ND: Float32[ndarray, "pairs width"],
    candidates_ND: Float32[ndarray, "pairs width"],
    k: int,
    groups_N: Int64[ndarray, " pairs"],
) -> float:
    """Return the share of queries with fewer than k wrong candidates at least as similar as the best right one."""
    rows = max(1, _CHUNK_ENTRIES // len(candidates_ND))
    hits = 0
    for start in range(0, len(queries_ND), rows):
        similarity_CN = queries_ND[start : start + rows] @ candidates_ND.T
        right_CN: Bool[ndarray, "chunk pairs"] = groups_N[start : start + rows, None] == groups_N
        best_C1 = np.where(right_CN, similarity_CN, -np.inf).max(1, keepdims=True)
        hits += int((((similarity_CN >= best_C1) & ~right_CN).sum(1) < k).sum())
    return hits / len(queries_ND)


def check_pairs(firsts: Sized, seconds: Sized) -> None:
    """Raise an error if the numbers of first and second texts differ.

    Raises:
        InputError: the counts differ.
    """
    if len(firsts) != len(seconds):
        raise InputError(f"got {len(firsts)} first texts but {len(seconds)} second texts; expected pairs")
