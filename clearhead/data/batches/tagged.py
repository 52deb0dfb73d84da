"""Tagged words as ids, made once and kept, and batches of them: the first piece of each word carries its tag.

Shape suffixes: B stretches of a batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from clearhead.data.batches.base import NO_LABEL, Batch, EpochBatches, LengthSortedPlan
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.batches.labelled import length_batches
from clearhead.data.stores.arrays import Indices
from clearhead.data.stores.tagged import TagStore
from clearhead.data.stores.word_chunks import NO_WORD


def collate_tagged(store: TagStore, rows: Indices, collator: InputCollator) -> Batch:
    """Make a batch of some stretches; the first piece of each word has its tag as label.

    Args:
        store: the stretches.
        rows: which of them, in the order of the batch; at least one.
        collator: how the model reads them.
    """
    rectangle = collator.collate([store.side[row] for row in rows])
    labels_BT = np.full(rectangle.ids.shape, NO_LABEL, dtype=np.int64)
    for index, row in enumerate(rows):
        start, end = store.side.offsets[row : row + 2]
        words_T = store.words[start:end]
        labels_BT[index, collator.front : collator.front + end - start] = np.where(
            words_T == NO_WORD, NO_LABEL, store.word_tags[words_T]
        )
    return Batch(
        ids=rectangle.ids,
        mask=rectangle.mask,
        labels=torch.from_numpy(labels_BT),
        num_labels=int((labels_BT != NO_LABEL).sum()),
        num_tokens=rectangle.num_tokens,
        rows=rows,
        segments=rectangle.segments,
    )


def tagged_batches(store: TagStore, collator: InputCollator, *, batch_tokens: int, seed: int) -> EpochBatches[Batch]:
    """Return endless training batches of stretches of similar lengths.

    Args:
        store: the stretches.
        collator: how the model reads them.
        batch_tokens: the most that stretches times the longest of a batch may be.
        seed: from 0; decides the order of every epoch.

    Raises:
        InputError: a stretch is longer than the budget.
    """
    return length_batches(
        store.lengths,
        lambda rows: collate_tagged(store, rows, collator),
        batch_tokens=batch_tokens,
        seed=seed,
        data=store.identity,
    )


def tagged_epoch(store: TagStore, collator: InputCollator, *, batch_tokens: int) -> Iterator[Batch]:
    """Go once through all stretches in order of length: what a validation does.

    Args:
        store: the stretches.
        collator: how the model reads them.
        batch_tokens: the budget of `tagged_batches`.

    Raises:
        InputError: a stretch is longer than the budget.
    """
    plan = LengthSortedPlan(store.lengths, store.lengths, batch_tokens=batch_tokens, seed=0, shuffle=False)
    return (collate_tagged(store, rows, collator) for rows in plan.epoch(0))
