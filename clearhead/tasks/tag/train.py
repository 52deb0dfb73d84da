"""Training of token classification: the model predicts the tag of a word at its first token.

Shape suffixes: B chunks, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from clearhead import spec
from clearhead.core import Transformer
from clearhead.core.kernels.linear_cross_entropy import NO_LABEL
from clearhead.data.arrays import Indices
from clearhead.data.batches.base import Batch
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.sources.tables import Share, TableSource
from clearhead.data.stores.store import Store
from clearhead.spec.tasks.record import TaskRecord
from clearhead.tasks.tag.data import tagged_texts
from clearhead.tasks.tag.splitting import NO_WORD
from clearhead.tasks.tag.store import prepare_tagged, splitter_of, tags_of
from clearhead.tasks.tag.tag_set import TagSet
from clearhead.tasks.tag.use import TagMeasures, measure_store
from clearhead.tasks.train import LabelledTraining, Stores
from clearhead.text.tokenizer import Tokenizer


class Training(LabelledTraining):
    """Training of a tagger of words."""

    def texts(self, source: TableSource, share: Share) -> list[str]:
        """Return the texts on which the tokenizer is trained."""
        return tagged_texts(source, share)

    def prepare(self, source: TableSource, share: Share, tokenizer: Tokenizer, train: Store | None) -> Store:
        """Tokenize the selected rows of a source as a store; the order of equal tags of the initial model is kept."""
        prepared = partial(prepare_tagged, source, tokenizer, max_length=self.run_file.data.max_length, share=share)
        if train is not None:
            return prepared(tags=tags_of(train))
        store, initial = prepared(), self.setup.initial
        names = tags_of(store).names
        known = None if initial is None else initial.match_labels("tag", names)
        return store if known is None or known == names else prepared(tags=TagSet(known))

    def record(self, stores: Stores[Store]) -> TaskRecord:
        """Return the task record of the trained model."""
        splitter = splitter_of(stores.train)
        return TaskRecord(
            kind="tag",
            labels=tags_of(stores.train).names,
            max_length=self.run_file.data.max_length,
            inner_signs=splitter.inner,
            sign_runs=splitter.runs,
        )

    def new_spec(self, tokenizer: Tokenizer, record: TaskRecord) -> spec.Model:
        """Return the spec of a model with a new head for this task."""
        return self.one_stack_spec(tokenizer, len(record.labels), "the words")

    def collate(self, store: Store, collator: InputCollator) -> Callable[[Indices], Batch]:
        """Return the function that makes a batch from row indices."""
        return lambda rows: collate_tagged(store, rows, collator)

    def measure(self, module: Transformer, tokenizer: Tokenizer, record: TaskRecord, store: Store) -> TagMeasures:
        """Return the metrics of the model on validation data."""
        return measure_store(module, tokenizer, store, batch_tokens=self.budget)


def collate_tagged(store: Store, rows: Indices, collator: InputCollator) -> Batch:
    """Return a batch of chunks of sentences; the label of a word's first token is the tag of the word.

    Args:
        store: the store of the chunks.
        rows: the indices of the examples, in the order of the batch; at least one.
        collator: the collator that adds special ids and padding.
    """
    chunks, tags_W = store.texts[0], store.ragged_rows("tag").ids
    inputs = collator.collate([chunks[row] for row in rows], limit=store.longest[0])
    labels_BT = np.full(inputs.ids.shape, NO_LABEL, dtype=np.int64)
    for index, row in enumerate(rows):
        start, end = chunks.offsets[row : row + 2]
        words_T = store.arrays["words"][start:end]
        labels_BT[index, collator.front : collator.front + end - start] = np.where(
            words_T == NO_WORD, NO_LABEL, tags_W[words_T]
        )
    return inputs.with_labels(torch.from_numpy(labels_BT), rows, num_labels=int((labels_BT != NO_LABEL).sum()))
