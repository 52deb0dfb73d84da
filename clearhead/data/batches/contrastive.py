"""Batches for contrastive training: pairs that mean the same, each the wrong answer to all others of its batch.

Padding and chance pull in two directions. Batches of similar lengths waste little, but sorted all alike they would
always set the same pairs against each other; batches drawn by lot waste a third of their positions. Between them: an
epoch is shuffled and cut into stretches of several batches, and only inside a stretch are pairs sorted by length.

Shape suffixes: B pairs of a batch, T tokens of the first text, U tokens of the second.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Int64
from numpy import ndarray
from torch import Tensor

from clearhead.data.batches.base import EpochBatches, pad_rows
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.stores.arrays import Indices, Rows
from clearhead.data.stores.pairs import PairStore
from clearhead.errors import InputError

# Batches in a stretch. On Multi30k with a budget of 4,096: 1 batch wastes 38 % of the positions, 4 waste 20 %,
# 16 waste 10 %, and all pairs sorted together 4 %.
_STRETCH = 16


@dataclass(frozen=True)
class ContrastiveBatch:
    """Some pairs as two rectangles of ids, each text between a start and an end token; masks are True at real tokens.

    Args:
        ids: the first texts.
        mask: where `ids` is real.
        other_ids: the second texts, row by row what belongs to `ids`.
        other_mask: where `other_ids` is real.
        groups: pairs with one number mean the same, and are no wrong answers to each other.
        num_labels: pairs.
        num_tokens: real tokens of both sides, start and end tokens included.
        rows: which pairs of the store these are.
    """

    ids: Int64[Tensor, "batch tokens"]
    mask: Bool[Tensor, "batch tokens"]
    other_ids: Int64[Tensor, "batch other_tokens"]
    other_mask: Bool[Tensor, "batch other_tokens"]
    groups: Int64[Tensor, " batch"]
    num_labels: int
    num_tokens: int
    rows: Int64[ndarray, " batch"]

    def to(self, device: torch.device | str) -> ContrastiveBatch:
        """Return the same batch with its tensors on a device."""
        return replace(
            self,
            ids=self.ids.to(device),
            mask=self.mask.to(device),
            other_ids=self.other_ids.to(device),
            other_mask=self.other_mask.to(device),
            groups=self.groups.to(device),
        )


def collate_contrastive(store: PairStore, rows: Indices, groups: Rows, collator: InputCollator) -> ContrastiveBatch:
    """Make a batch of some pairs of a store.

    Args:
        store: the pairs, both sides in one vocabulary.
        rows: which pairs, in the order of the batch; at least one.
        groups: what `store_groups` says of the whole store.
        collator: how the model reads single texts.
    """
    around, pad = collator.special_tokens.for_text, collator.pad
    ids_BT, mask_BT, _ = pad_rows(store.source_side, rows, around, fill=pad)
    other_ids_BU, other_mask_BU, _ = pad_rows(store.target_side, rows, around, fill=pad)
    return ContrastiveBatch(
        ids=torch.from_numpy(ids_BT),
        mask=torch.from_numpy(mask_BT),
        other_ids=torch.from_numpy(other_ids_BU),
        other_mask=torch.from_numpy(other_mask_BU),
        groups=torch.from_numpy(groups[rows]),
        num_labels=len(rows),
        num_tokens=int(mask_BT.sum()) + int(other_mask_BU.sum()),
        rows=rows,
    )


def positive_groups(pairs: Iterable[tuple[Hashable, Hashable]]) -> Rows:
    """Number pairs of texts so that pairs that must mean the same have one number.

    Two pairs mean the same when they share a text, on either side, and so do pairs that are joined by a chain of such.

    Args:
        pairs: the two texts of each pair, as strings or as ids in one vocabulary.

    Returns:
        the number of each pair's group, which is that of its first pair.
    """
    first_with: dict[Hashable, int] = {}
    group: list[int] = []
    for row, pair in enumerate(pairs):
        group.append(row)
        for text in pair:
            one, two = _root(group, row), _root(group, first_with.setdefault(text, row))
            group[max(one, two)] = min(one, two)
    for row in range(len(group)):
        # An earlier pair already points to its root, and no pair points to a later one.
        group[row] = group[group[row]]
    return np.array(group, dtype=np.int64)


def store_groups(store: PairStore) -> Rows:
    """Return what `same_meaning` says of the pairs of a store, both sides in one vocabulary."""
    return positive_groups((store.source(row).tobytes(), store.target(row).tobytes()) for row in range(len(store)))


def _root(group: list[int], row: int) -> int:
    """Follow a pair to the first of its group, and shorten the way for the next who asks."""
    while (parent := group[row]) != row:
        group[row] = group[parent]
        row = parent
    return row


class ContrastivePlan:
    """Which pairs go together: by chance but of similar lengths, rows times the longest side within the budget.

    Args:
        source_lengths: tokens of each first text as the model reads it, start and end token included.
        target_lengths: tokens of each second text.
        batch_tokens: the budget: the most that rows * max(longest source, longest target) may be.
        seed: from 0; one seed gives one order for every epoch.

    Raises:
        InputError: there are not two pairs, a pair is longer than the budget, or the seed is negative.
    """

    def __init__(self, source_lengths: Rows, target_lengths: Rows, *, batch_tokens: int, seed: int) -> None:
        assert len(source_lengths) == len(target_lengths), "lengths come in pairs"
        if len(source_lengths) < 2:
            raise InputError(
                f"there is {len(source_lengths)} pair; contrastive training needs at least 2, to tell them apart"
            )
        if seed < 0:
            raise InputError(f"seed is {seed}; expected 0 or more")
        self.batch_tokens = batch_tokens
        self.seed = seed
        self._source = np.asarray(source_lengths, dtype=np.int64)
        self._target = np.asarray(target_lengths, dtype=np.int64)
        self._longest = np.maximum(self._source, self._target)
        longest = int(self._longest.max())
        if 2 * longest > batch_tokens:
            raise InputError(
                f"batch_tokens is {batch_tokens}, but the longest pair has {longest} tokens on one side and a batch "
                f"needs two pairs to tell apart; raise batch_tokens to at least {2 * longest}, or lower max_length"
            )

    def __len__(self) -> int:
        return len(self._source)

    @property
    def num_tokens(self) -> int:
        """All tokens of both sides."""
        return int(self._source.sum() + self._target.sum())

    def epoch(self, number: int) -> list[Indices]:
        """Return the batches of an epoch, each the indices of its pairs; every pair is in exactly one.

        Args:
            number: the epoch, counted from 0.
        """
        # Raw bits: numpy keeps this stream the same for ever, which it does not promise for its distributions.
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, number])).random_raw(2 * len(self))
        order = np.argsort(bits[: len(self)], kind="stable")
        in_stretch = _STRETCH * self.batch_tokens / float(self._longest.mean())
        stretches = np.array_split(order, max(1, round(len(self) / in_stretch)))
        batches = [rows for stretch in stretches for rows in self._cut(stretch)]
        return [batches[index] for index in np.argsort(bits[len(self) : len(self) + len(batches)], kind="stable")]

    def _cut(self, rows: Indices) -> list[Indices]:
        """Sort a stretch by length, longest first, and cut it into batches."""
        # Of pairs with one longest side those that differ alike stand together, so that the other side is narrow too.
        order = rows[np.lexsort(((self._source - self._target)[rows], -self._longest[rows]))]
        batches: list[Indices] = []
        start = 0
        while start < len(order):
            count = self.batch_tokens // int(self._longest[order[start]])
            batches.append(order[start : start + count])
            start += count
        if len(batches) > 1 and len(batches[-1]) < len(batches[-2]):
            # A remainder of a few pairs would have next to nothing to tell apart.
            batches[-2:] = np.array_split(np.concatenate(batches[-2:]), 2)
        return batches

    def padding_waste(self, number: int) -> float:
        """Return the share of padding among all positions of both sides in an epoch, 0 to 1."""
        positions = sum(
            len(rows) * int(self._source[rows].max() + self._target[rows].max()) for rows in self.epoch(number)
        )
        return 1 - self.num_tokens / positions


def contrastive_plan(store: PairStore, collator: InputCollator, *, batch_tokens: int, seed: int) -> ContrastivePlan:
    """Plan the batches of a store.

    Args:
        store: the pairs.
        collator: how the model reads single texts.
        batch_tokens, seed: as in `ContrastPlan`.

    Raises:
        InputError: as `ContrastPlan`.
    """
    extra = collator.special_tokens.num_added()
    return ContrastivePlan(
        store.source_lengths + extra, store.target_lengths + extra, batch_tokens=batch_tokens, seed=seed
    )


def contrastive_batches(
    store: PairStore, collator: InputCollator, *, batch_tokens: int, seed: int
) -> EpochBatches[ContrastiveBatch]:
    """Return endless training batches for contrastive training.

    Args:
        store: the pairs, both sides in one vocabulary.
        collator: how the model reads single texts.
        batch_tokens: the budget of `ContrastPlan`.
        seed: from 0; decides the order of every epoch.

    Raises:
        InputError: there are not two pairs, or a pair is longer than the budget.
    """
    groups = store_groups(store)
    identity = {"seed": seed, "batch_tokens": batch_tokens, "pairs": len(store), "data": store.identity}
    return EpochBatches(
        contrastive_plan(store, collator, batch_tokens=batch_tokens, seed=seed),
        lambda rows, _epoch, _index: collate_contrastive(store, rows, groups, collator),
        identity=identity,
    )


def contrastive_epoch(
    store: PairStore, groups: Rows, collator: InputCollator, *, batch_tokens: int
) -> Iterator[ContrastiveBatch]:
    """Go once through all pairs, in batches that are the same at every call: what a validation does.

    Args:
        store: the pairs, both sides in one vocabulary.
        groups: what `store_groups` says of the store.
        collator: how the model reads single texts.
        batch_tokens: the budget of `ContrastPlan`.

    Raises:
        InputError: there are not two pairs, or a pair is longer than the budget.
    """
    plan = contrastive_plan(store, collator, batch_tokens=batch_tokens, seed=0)
    return (collate_contrastive(store, rows, groups, collator) for rows in plan.epoch(0))
