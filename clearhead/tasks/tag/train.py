"""The training of token classification: a tag for each word, predicted at its first token.

Shape suffixes: B chunks, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from clearhead import spec
from clearhead.core import Transformer
from clearhead.data.batches.base import Batch
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.sources.tables import Share
from clearhead.data.sources.tagged import TaggedSource, tagged_texts
from clearhead.data.stores.arrays import Indices
from clearhead.data.stores.tag_set import TagSet
from clearhead.data.stores.tagged import TagStore, prepare_tagged
from clearhead.data.stores.word_chunks import NO_WORD
from clearhead.evaluate.result import Validation
from clearhead.kernels.linear_cross_entropy import NO_LABEL
from clearhead.tasks.record import TaskRecord
from clearhead.tasks.tag.data import parse_tagged_source
from clearhead.tasks.tag.use import measure_store
from clearhead.tasks.train import LabelledTraining, Stores
from clearhead.text.tokenizer import Tokenizer


class Training(LabelledTraining[TaggedSource, TagStore]):
    """The training of a tagger of words."""

    parse = staticmethod(parse_tagged_source)
    texts = staticmethod(tagged_texts)

    def prepare(self, source: TaggedSource, share: Share, tokenizer: Tokenizer, train: TagStore | None) -> TagStore:
        """As of `LabelledTraining`; tags of the data that are those of the initial model are in its order."""
        prepared = partial(prepare_tagged, source, tokenizer, max_length=self.run_file.data.max_length, share=share)
        if train is not None:
            return prepared(tags=train.tags)
        store, initial = prepared(), self.setup.initial
        known = None if initial is None else initial.labels_like("tag", store.tags.names)
        return store if known is None or known == store.tags.names else prepared(tags=TagSet(known))

    def record(self, stores: Stores[TagStore]) -> TaskRecord:
        """As of `LabelledTraining`."""
        store = stores.train
        return TaskRecord(
            kind="tag",
            labels=store.tags.names,
            max_length=self.run_file.data.max_length,
            inner_signs=store.splitter.inner,
            sign_runs=store.splitter.runs,
        )

    def new_spec(self, tokenizer: Tokenizer, record: TaskRecord) -> spec.Model:
        """As of `LabelledTraining`."""
        return self.one_stack_spec(tokenizer, len(record.labels), "the words")

    def collate(self, store: TagStore, collator: InputCollator) -> Callable[[Indices], Batch]:
        """As of `LabelledTraining`."""
        return lambda rows: collate_tagged(store, rows, collator)

    def measure(self, module: Transformer, tokenizer: Tokenizer, record: TaskRecord, store: TagStore) -> Validation:
        """As of `LabelledTraining`."""
        measures = measure_store(module, tokenizer, store, batch_tokens=self.budget)
        return Validation(loss=measures.loss, score=measures.score)


def collate_tagged(store: TagStore, rows: Indices, collator: InputCollator) -> Batch:
    """Make a batch of some chunks of sentences; the label of a word's first token is the word's tag.

    Args:
        store: the chunks.
        rows: which of them, in the order of the batch; at least one.
        collator: adds the special ids and the padding of the model.
    """
    inputs = collator.collate([store.chunks[row] for row in rows], limit=store.longest[0])
    labels_BT = np.full(inputs.ids.shape, NO_LABEL, dtype=np.int64)
    for index, row in enumerate(rows):
        start, end = store.chunks.offsets[row : row + 2]
        words_T = store.words[start:end]
        labels_BT[index, collator.front : collator.front + end - start] = np.where(
            words_T == NO_WORD, NO_LABEL, store.word_tags[words_T]
        )
    return inputs.with_labels(torch.from_numpy(labels_BT), rows, num_labels=int((labels_BT != NO_LABEL).sum()))
