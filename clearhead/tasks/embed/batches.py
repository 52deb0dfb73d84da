"""Batches for contrastive training: the second text of a pair is a negative for all other pairs of its batch.

Batches of similar lengths waste little padding, but sorting all pairs would always compare the same pairs. Random
batches waste a third of their positions. As a compromise, each epoch is shuffled and cut into groups of several
batches, and pairs are sorted by length only within a group.

Shape suffixes: B pairs of a batch, T tokens of the first text, U tokens of the second.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Int64
from numpy import ndarray
from torch import Tensor

from clearhead.data.arrays import Indices, Rows
from clearhead.data.batches.base import DeviceBatch, pad_rows
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.batches.plans import LengthPlan
from clearhead.data.stores.store import Store

# Batches per group. On Multi30k with a budget of 4,096 tokens, padding takes 38 % of the positions with 1 batch per
# group. With 4 batches it takes 20 %, with 16 batches 10 %, and 4 % if all pairs are sorted.
_GROUP = 16


@dataclass(frozen=True)
class ContrastiveBatch(DeviceBatch):
    """Batch of pairs: two padded batches of texts with special ids; masks are True at real tokens.

    Args:
        ids: the ids of the first texts.
        mask: the mask of `ids`.
        other_ids: the ids of the second texts; row i is the partner of row i of `ids`.
        other_mask: the mask of `other_ids`.
        groups: the group number of each pair; pairs of one group are positives of each other.
        num_labels: the number of pairs.
        num_tokens: the number of real tokens on both sides, special tokens included.
        rows: the indices of the pairs in the store.
    """

    ids: Int64[Tensor, "batch tokens"]
    mask: Bool[Tensor, "batch tokens"]
    other_ids: Int64[Tensor, "batch other_tokens"]
    other_mask: Bool[Tensor, "batch other_tokens"]
    groups: Int64[Tensor, " batch"]
    num_labels: int
    num_tokens: int
    rows: Int64[ndarray, " batch"]


def collate_contrastive(store: Store, rows: Indices, groups: Rows, collator: InputCollator) -> ContrastiveBatch:
    """Return a batch of pairs.

    Args:
        store: the store of the pairs, both sides in one vocabulary.
        rows: the indices of the pairs, in the order of the batch; at least one.
        groups: the result of `store_groups` for the whole store.
        collator: the collator that adds special ids and padding.
    """
    special, pad = collator.special_tokens.for_text, collator.pad
    first, second = (
        pad_rows(side.take(rows), special, fill=pad, limit=side.longest + len(special)) for side in store.texts
    )
    return ContrastiveBatch(
        ids=first.ids,
        mask=first.mask,
        other_ids=second.ids,
        other_mask=second.mask,
        groups=torch.from_numpy(groups[rows]),
        num_labels=len(rows),
        num_tokens=first.num_tokens + second.num_tokens,
        rows=rows,
    )


def positive_groups(pairs: Iterable[tuple[Hashable, Hashable]]) -> Rows:
    """Return a group number for each pair; pairs with the same number are positives of each other.

    Two pairs are positives if they share a text, on either side, or if a chain of such pairs connects them.

    Args:
        pairs: the two texts of each pair, as strings or as ids in one vocabulary.

    Returns:
        The number of each pair's group: the index of the first pair in the group.
    """
    first_with: dict[Hashable, int] = {}
    group: list[int] = []
    for row, pair in enumerate(pairs):
        group.append(row)
        for text in pair:
            first, second = sorted((_root(group, row), _root(group, first_with.setdefault(text, row))))
            group[second] = first
    for row in range(len(group)):
        # Earlier pairs already point to their root, and no pair points to a later one.
        group[row] = group[group[row]]
    return np.array(group, dtype=np.int64)


def store_groups(store: Store) -> Rows:
    """Return the `positive_groups` of the pairs in a store, both sides in one vocabulary."""
    firsts, seconds = store.texts
    return positive_groups((firsts[row].tobytes(), seconds[row].tobytes()) for row in range(len(store)))


def _root(group: list[int], row: int) -> int:
    """Return the first pair of a pair's group (union-find root), and shorten the path for later calls."""
    while (parent := group[row]) != row:
        group[row] = group[parent]
        row = parent
    return row


class ContrastivePlan(LengthPlan):
    """Plan of random batches with pairs of similar lengths; see `LengthPlan` for its arguments."""

    least_rows: ClassVar[int] = 2

    def epoch(self, number: int) -> list[Indices]:
        """Return the batches of an epoch; see `LengthPlan`."""
        # Raw bits, because numpy keeps them the same across versions, but not its distributions.
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, number])).random_raw(2 * len(self))
        order = np.argsort(bits[: len(self)], kind="stable")
        group_size = _GROUP * self.batch_tokens / float(self._longest.mean())
        groups = np.array_split(order, max(1, round(len(self) / group_size)))
        batches = [rows for group in groups for rows in self._cut_group(group)]
        return [batches[index] for index in np.argsort(bits[len(self) : len(self) + len(batches)], kind="stable")]

    def _cut_group(self, rows: Indices) -> list[Indices]:
        """Sort one group of rows by length and cut it into batches; the batch of the longest rows comes first."""
        # Among pairs with the same longest side, sort by the difference, so that the other side has little padding.
        batches = self._cut(rows[np.lexsort(((self._source - self._target)[rows], self._longest[rows]))])
        if len(batches) > 1 and len(batches[-1]) < len(batches[-2]):
            # A small last batch would have few negatives, so the last two batches are divided evenly.
            batches[-2:] = np.array_split(np.concatenate(batches[-2:]), 2)
        return batches


def contrastive_plan(store: Store, collator: InputCollator, *, batch_tokens: int, seed: int) -> ContrastivePlan:
    """Return the batch plan for a store of pairs whose two texts the model reads separately; see `LengthPlan`."""
    num_special = collator.special_tokens.num_added()
    lengths = (side.lengths + num_special for side in store.texts)
    return ContrastivePlan(*lengths, batch_tokens=batch_tokens, seed=seed)
