"""Batches of tokenised pairs, for models that read a source and write a target.

Shape suffixes: B rows of a batch, S source tokens, T target tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from clearhead.data.batches.base import NO_LABEL, Batch, EpochBatches, LengthSortedPlan, pad_rows
from clearhead.data.stores.arrays import Indices
from clearhead.data.stores.pairs import PairStore


def collate(store: PairStore, rows: Indices) -> Batch:
    """Make a batch of some pairs of a store.

    Args:
        store: the pairs.
        rows: which pairs, in the order of the batch; at least one.
    """
    special, said = store.special, store.special.said
    ids_BS, mask_BS, num_source = pad_rows(store.source_side, rows, special.read, fill=special.source_pad)
    target_ids_BT, mask_BT, _ = pad_rows(store.target_side, rows, said.decoder_input, fill=special.target_pad)
    labels_BT, _, num_labels = pad_rows(store.target_side, rows, said.labels, fill=NO_LABEL)
    return Batch(
        ids=torch.from_numpy(ids_BS),
        mask=torch.from_numpy(mask_BS),
        target_ids=torch.from_numpy(target_ids_BT),
        target_mask=torch.from_numpy(mask_BT),
        labels=torch.from_numpy(labels_BT),
        num_labels=num_labels,
        num_tokens=num_source + num_labels,
        rows=rows,
    )


def pair_batches(store: PairStore, *, batch_tokens: int, seed: int, shuffle: bool = True) -> EpochBatches[Batch]:
    """Return endless training batches of pairs.

    Args:
        store: the pairs.
        batch_tokens: the budget of `TokenBatches`.
        seed: from 0; decides the order of every epoch.
        shuffle: False gives the same order in every epoch.

    Raises:
        InputError: a pair is longer than the budget.
    """
    plan = pair_plan(store, batch_tokens=batch_tokens, seed=seed, shuffle=shuffle)
    identity = {
        "seed": seed,
        "shuffle": shuffle,
        "batch_tokens": batch_tokens,
        "pairs": len(store),
        "data": store.identity,
    }
    return EpochBatches(plan, lambda rows, epoch, index: collate(store, rows), identity=identity)


def pair_plan(store: PairStore, *, batch_tokens: int, seed: int, shuffle: bool = True) -> LengthSortedPlan:
    """Return which pairs go together; arguments as of `pair_batches`."""
    return LengthSortedPlan(
        store.read_lengths, store.said_lengths, batch_tokens=batch_tokens, seed=seed, shuffle=shuffle
    )


def epoch_batches(store: PairStore, *, batch_tokens: int) -> Iterator[Batch]:
    """Go once through all pairs in order of length: what a validation does.

    Args:
        store: the pairs.
        batch_tokens: the budget of `TokenBatches`.

    Raises:
        InputError: a pair is longer than the budget.
    """
    plan = pair_plan(store, batch_tokens=batch_tokens, seed=0, shuffle=False)
    return (collate(store, rows) for rows in plan.epoch(0))
