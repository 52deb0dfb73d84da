"""Training of extractive question answering: batches of windows, and the loss of the answer's start and end.

Shape suffixes: B windows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.core import Transformer
from clearhead.core.kernels.linear_cross_entropy import NO_LABEL
from clearhead.data.arrays import Indices
from clearhead.data.batches.base import Batch
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.sources.tables import Share, TableSource
from clearhead.data.stores.store import Store
from clearhead.spec.tasks.record import TaskRecord
from clearhead.tasks.answer.data import answer_texts
from clearhead.tasks.answer.store import NO_ANSWER, prepare_answers, window_ids
from clearhead.tasks.answer.use import AnswerMeasures, check_no_answer, longest_answer, measure_store
from clearhead.tasks.outputs import run_batch
from clearhead.tasks.train import LabelledTraining, Stores
from clearhead.text.tokenizer import Tokenizer


class Training(LabelledTraining):
    """Training of a model that answers questions from their contexts."""

    def texts(self, source: TableSource, share: Share) -> list[str]:
        """Return the texts on which the tokenizer is trained."""
        return answer_texts(source, share)

    def prepare(self, source: TableSource, share: Share, tokenizer: Tokenizer, train: Store | None) -> Store:
        """Tokenize the selected rows of a source, and return them as a store."""
        return prepare_answers(source, tokenizer, max_length=self.run_file.data.max_length, share=share)

    def record(self, stores: Stores[Store]) -> TaskRecord:
        """Return the task record of the trained model."""
        longest = stores.train.facts["report"]["answer_tokens"]
        if not longest:
            raise InputError("[data] train: no question has an answer; add questions that have one")
        length = self.run_file.data.max_length
        return TaskRecord(kind="answer", max_length=length, is_paired=True, answer_tokens=longest)

    def new_spec(self, tokenizer: Tokenizer, record: TaskRecord) -> spec.Model:
        """Return the spec of a model with a new head for this task."""
        return self.one_stack_spec(tokenizer, 2, "the context")

    def collate(self, store: Store, collator: InputCollator) -> Callable[[Indices], Batch]:
        """Return the function that makes a batch from row indices."""
        check_no_answer(collator)
        return lambda rows: collate_answers(store, rows, collator)

    def loss(self, module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Return the summed loss of a batch, and the number of its labels."""
        smoothing = self.run_file.train.label_smoothing
        return answer_loss(module, batch.to(self.setup.device), label_smoothing=smoothing)

    def measure(self, module: Transformer, tokenizer: Tokenizer, record: TaskRecord, store: Store) -> AnswerMeasures:
        """Return the metrics of the model on validation data."""
        collator, longest = InputCollator.of(module.spec, tokenizer, record.repeats), longest_answer(record)
        return measure_store(module, collator, store, max_tokens=longest, batch_tokens=self.budget)


def collate_answers(store: Store, rows: Indices, collator: InputCollator) -> Batch:
    """Return a batch of windows of contexts, each preceded by its question.

    The labels [B, T, 2] are 1 at the tokens at which the answer starts and ends, and 0 at the other tokens of the
    window. An answer outside of the window starts and ends at the first special id. All other tokens have NO_LABEL.

    Args:
        store: the store of the windows.
        rows: the indices of the examples, in the order of the batch; at least one.
        collator: the collator that adds special ids and padding.

    Source: arXiv 1810.04805, section 4.2 and 4.3.
    """
    questions, contexts = zip(*(window_ids(store, row) for row in rows), strict=True)
    inputs = collator.collate(questions, contexts, limit=store.longest[0])
    labels_BT2 = np.full((*inputs.ids.shape, 2), NO_LABEL, dtype=np.int64)
    for index, row in enumerate(rows):
        start = collator.second_start(len(questions[index]))
        labels_BT2[index, 0] = 0
        labels_BT2[index, start : start + len(contexts[index])] = 0
        for side, token in enumerate(store.arrays["labels"][row].tolist()):
            labels_BT2[index, 0 if token == NO_ANSWER else start + token, side] = 1
    return inputs.with_labels(torch.from_numpy(labels_BT2), rows, num_labels=len(rows))


def answer_loss(module: nn.Module, batch: Batch, *, label_smoothing: float = 0.0) -> tuple[Float[Tensor, ""], int]:
    """Return the summed loss of a batch of windows: the mean of the cross-entropies of start and end.

    Args:
        module: a Transformer whose head gives each token two scores.
        batch: a batch from `collate_answers`.
        label_smoothing: the share of the target that is spread evenly over the possible start or end tokens.

    Returns:
        The sum in nats and the number of windows.

    Source: arXiv 1810.04805, section 4.2.
    """
    assert isinstance(module, Transformer), "a model that answers questions is a Transformer"
    is_possible_BT2, is_right_BT2 = batch.labels != NO_LABEL, batch.labels == 1
    logits_BT2 = run_batch(module, batch).float().masked_fill(~is_possible_BT2, -torch.inf)
    log_probabilities_BT2 = logits_BT2.log_softmax(1)
    loss = -log_probabilities_BT2.masked_fill(~is_right_BT2, 0.0).sum()
    if label_smoothing:
        mean_B2 = log_probabilities_BT2.masked_fill(~is_possible_BT2, 0.0).sum(1) / is_possible_BT2.sum(1)
        loss = (1.0 - label_smoothing) * loss - label_smoothing * mean_B2.sum()
    return loss / 2, len(batch.labels)
