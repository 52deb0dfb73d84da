"""Labelled texts as ids, made once and kept, and batches of them.

Shape suffixes: N texts, B texts of a batch, T tokens, L classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy import ndarray

from clearhead.data.batches.base import Batch, EpochBatches, LengthSortedPlan
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.stores.arrays import (
    Indices,
    Rows,
)
from clearhead.data.stores.labelled import LabelStore


def collate_labelled(store: LabelStore, rows: Indices, collator: InputCollator) -> Batch:
    """Make a batch of some labelled texts.

    Args:
        store: the texts.
        rows: which of them, in the order of the batch; at least one.
        collator: how the model reads them.
    """
    texts = [store.texts(row) for row in rows]
    seconds = [pair[1] for pair in texts] if store.is_paired else None
    rectangle = collator.collate([pair[0] for pair in texts], seconds)
    values: Int64[ndarray, " batch"] | Float[ndarray, "batch ..."] = store.values[rows]
    labels = torch.from_numpy(values.astype(np.int64 if store.labels.kind == "single_label" else np.float32))
    return Batch(
        ids=rectangle.ids,
        mask=rectangle.mask,
        labels=labels,
        num_labels=labels.numel(),
        num_tokens=rectangle.num_tokens,
        rows=rows,
        target_ids=rectangle.target_ids,
        target_mask=rectangle.target_mask,
        segments=rectangle.segments,
    )


def labelled_batches(
    store: LabelStore, collator: InputCollator, *, batch_tokens: int, seed: int
) -> EpochBatches[Batch]:
    """Return endless training batches of labelled texts of similar lengths.

    Args:
        store: the texts.
        collator: how the model reads them.
        batch_tokens: the most that texts times the longest sequence of a batch may be.
        seed: from 0; decides the order of every epoch.

    Raises:
        InputError: a text is longer than the budget.
    """
    return length_batches(
        store.lengths,
        lambda rows: collate_labelled(store, rows, collator),
        batch_tokens=batch_tokens,
        seed=seed,
        data=store.identity,
    )


def labelled_epoch(store: LabelStore, collator: InputCollator, *, batch_tokens: int) -> Iterator[Batch]:
    """Go once through all labelled texts in order of length: what a validation does.

    Args:
        store: the texts.
        collator: how the model reads them.
        batch_tokens: the budget of `labelled_batches`.

    Raises:
        InputError: a text is longer than the budget.
    """
    plan = LengthSortedPlan(store.lengths, store.lengths, batch_tokens=batch_tokens, seed=0, shuffle=False)
    return (collate_labelled(store, rows, collator) for rows in plan.epoch(0))


def length_batches(
    lengths: Rows, make: Callable[[Indices], Batch], *, batch_tokens: int, seed: int, data: str
) -> EpochBatches[Batch]:
    """Return endless batches of sequences of similar lengths.

    Args:
        lengths: of the sequences as the model reads them.
        make: makes a batch of some of them.
        batch_tokens: the most that rows times the longest sequence of a batch may be.
        seed: from 0; decides the order of every epoch.
        data: the identity of the data.

    Raises:
        InputError: a sequence is longer than the budget.
    """
    plan = LengthSortedPlan(lengths, lengths, batch_tokens=batch_tokens, seed=seed)
    identity: dict[str, Any] = {"seed": seed, "batch_tokens": batch_tokens, "examples": len(lengths), "data": data}
    return EpochBatches(plan, lambda rows, epoch, index: make(rows), identity=identity)
