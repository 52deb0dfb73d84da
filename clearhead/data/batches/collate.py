"""Examples of a store as a batch: pairs, labelled texts, tagged words, and questions with their contexts.

Shape suffixes: B rows of a batch, T tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy import ndarray

from clearhead.data.batches.base import Batch, seq2seq_batch
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.stores.answers import NO_ANSWER, AnswerStore
from clearhead.data.stores.arrays import Indices
from clearhead.data.stores.labelled import LabelStore
from clearhead.data.stores.pairs import PairStore
from clearhead.data.stores.tagged import TagStore
from clearhead.data.stores.word_chunks import NO_WORD
from clearhead.kernels.linear_cross_entropy import NO_LABEL


def collate_pairs(store: PairStore, rows: Indices) -> Batch:
    """Make a batch of some pairs.

    Args:
        store: the pairs.
        rows: which pairs, in the order of the batch; at least one.
    """
    tokenizers = store.tokenizers
    sides = store.sources.take(rows), store.targets.take(rows)
    return seq2seq_batch(*sides, tokenizers.source, tokenizers.target, rows, limits=store.longest)


def collate_labelled(store: LabelStore, rows: Indices, collator: InputCollator) -> Batch:
    """Make a batch of some labelled texts.

    Args:
        store: the texts.
        rows: which of them, in the order of the batch; at least one.
        collator: adds the special ids and the padding of the model.
    """
    inputs = collator.collate(*([part[row] for row in rows] for part in store.texts), limit=store.longest[0])
    values: Int64[ndarray, " batch"] | Float[ndarray, "batch ..."] = store.values[rows]
    labels = torch.from_numpy(values.astype(np.int64 if store.labels.kind == "single_label" else np.float32))
    return inputs.with_labels(labels, rows, num_labels=labels.numel())


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


def collate_answers(store: AnswerStore, rows: Indices, collator: InputCollator) -> Batch:
    """Make a batch of some windows of contexts, each behind its question.

    The labels [B, T, 2] say of each token whether the answer starts and whether it ends there: 1 or 0, and NO_LABEL
    where it cannot. An answer that is not in the window starts and ends at the special id in front.

    Args:
        store: the windows.
        rows: which of them, in the order of the batch; at least one.
        collator: adds the special ids and the padding of the model.

    Source: arXiv 1810.04805, section 4.2 and 4.3.
    """
    questions, contexts = zip(*map(store.ids, rows), strict=True)
    inputs = collator.collate(questions, contexts, limit=store.longest[0])
    labels_BT2 = np.full((*inputs.ids.shape, 2), NO_LABEL, dtype=np.int64)
    for index, row in enumerate(rows):
        start = collator.second_place(len(questions[index]))
        labels_BT2[index, 0] = 0
        labels_BT2[index, start : start + len(contexts[index])] = 0
        for side, token in enumerate(store.labels[row].tolist()):
            labels_BT2[index, 0 if token == NO_ANSWER else start + token, side] = 1
    return inputs.with_labels(torch.from_numpy(labels_BT2), rows, num_labels=len(rows))
