"""Training of text classification: single-label, multi-label or regression, for texts or pairs of texts.

Shape suffixes: B texts, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import assert_never

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy import ndarray
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.core import Transformer
from clearhead.data.arrays import Indices
from clearhead.data.batches.base import Batch
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.sources.tables import Share, TableSource
from clearhead.data.stores.store import Store
from clearhead.spec.presets.task_heads import default_label_head, default_pool, token_head, with_head
from clearhead.spec.tasks.record import LabelKind, TaskRecord
from clearhead.tasks.classify.data import ClassifyTask, labelled_texts
from clearhead.tasks.classify.label_set import LabelSet
from clearhead.tasks.classify.store import is_paired, labels_of, prepare_labelled
from clearhead.tasks.classify.use import ClassifyMeasures, measure_store
from clearhead.tasks.outputs import run_batch
from clearhead.tasks.train import LabelledTraining, Stores
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.task_setup import PreparedTask, TaskSetup

SCORES: Mapping[LabelKind, str] = MappingProxyType(
    {"single_label": "accuracy", "multi_label": "micro F1", "regression": "Spearman"}
)


class Training(LabelledTraining):
    """Training of a classifier.

    Args:
        setup: the setup of the run.

    Attributes:
        kind: the kind of labels.
    """

    def texts(self, source: TableSource, share: Share) -> list[str]:
        """Return the texts on which the tokenizer is trained."""
        return labelled_texts(source, share, kind=self.kind)

    def __init__(self, setup: TaskSetup) -> None:
        super().__init__(setup)
        self.kind: LabelKind = self.task_table(ClassifyTask).labels

    def parts(self) -> PreparedTask[Batch]:
        """Return the prepared task of the run: its data, tokenizers and spec."""
        if self.kind == "regression" and self.run_file.train.label_smoothing:
            raise InputError("[train] label_smoothing has no effect on a regression; remove it")
        return replace(super().parts(), score_name=SCORES[self.kind])

    def prepare(self, source: TableSource, share: Share, tokenizer: Tokenizer, train: Store | None) -> Store:
        """Tokenize the selected rows of a source, and return them as a store."""
        length = self.run_file.data.max_length
        prepared = partial(prepare_labelled, source, tokenizer, max_length=length, kind=self.kind, share=share)
        if train is not None:
            return prepared(labels=labels_of(train))
        store = prepared()
        labels = labels_of(store)
        known = self._reuse_initial_labels(labels)
        return store if known == labels else prepared(labels=known)

    def _reuse_initial_labels(self, labels: LabelSet) -> LabelSet:
        """Return the label set of the initial model if it has the same labels, so that its head can be reused."""
        initial = self.setup.initial
        if initial is None or initial.record.kind != "classify" or initial.record.label_kind != labels.kind:
            return labels
        if labels.kind == "regression":
            return LabelSet("regression", (), initial.record.number_mean, initial.record.number_scale)
        names = initial.match_labels("classify", labels.names)
        return labels if names is None else LabelSet(labels.kind, names)

    def record(self, stores: Stores[Store]) -> TaskRecord:
        """Return the task record of the trained model."""
        labels = labels_of(stores.train)
        if is_paired(stores.train) != is_paired(stores.valid):
            raise InputError("[data] pair: training and validation data must both be pairs, or both be single texts")
        return TaskRecord(
            kind="classify",
            labels=labels.names,
            label_kind=self.kind,
            max_length=self.run_file.data.max_length,
            is_paired=is_paired(stores.train),
            number_mean=labels.mean,
            number_scale=labels.scale,
        )

    def reuse_initial_head(self, tokenizer: Tokenizer, record: TaskRecord) -> tuple[spec.Model, TaskRecord] | None:
        """Return the spec with the head of the initial model; None if the run file sets another pooling."""
        return None if self.task_table(ClassifyTask).pool is not None else super().reuse_initial_head(tokenizer, record)

    def new_spec(self, tokenizer: Tokenizer, record: TaskRecord) -> spec.Model:
        """Return the spec of a model with a new head for this task."""
        # The label head needs the width of the spec, so the spec is first built with a placeholder head.
        model = self.setup.build_spec(source_vocab=tokenizer.vocab_size, head=token_head(1))
        pool = self.task_table(ClassifyTask).pool or default_pool(model)
        if pool == "first" and model.encoder is None:
            raise InputError(
                "[task] pool = 'first' is the start token, which does not attend to the text in a decoder; use 'last'"
            )
        return with_head(model, default_label_head(model, len(record.labels) or 1, pool=pool))

    def collate(self, store: Store, collator: InputCollator) -> Callable[[Indices], Batch]:
        """Return the function that makes a batch from row indices."""
        return lambda rows: collate_labelled(store, rows, collator)

    def loss(self, module: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Return the summed loss of a batch, and the number of its labels."""
        smoothing = self.run_file.train.label_smoothing
        return label_loss(module, batch.to(self.setup.device), kind=self.kind, label_smoothing=smoothing)

    def measure(self, module: Transformer, tokenizer: Tokenizer, record: TaskRecord, store: Store) -> ClassifyMeasures:
        """Return the metrics of the model on validation data."""
        return measure_store(module, tokenizer, store, batch_tokens=self.budget, repeats=record.repeats)


def collate_labelled(store: Store, rows: Indices, collator: InputCollator) -> Batch:
    """Return a batch of labelled texts.

    Args:
        store: the store of the texts.
        rows: the indices of the examples, in the order of the batch; at least one.
        collator: the collator that adds special ids and padding.
    """
    inputs = collator.collate(*([text[row] for row in rows] for text in store.texts), limit=store.longest[0])
    values: Int64[ndarray, " batch"] | Float[ndarray, "batch ..."] = store.arrays["labels"][rows]
    # Cross-entropy needs classes as integer indices; all other targets are floats.
    labels = torch.from_numpy(values.astype(np.int64 if values.dtype == np.int64 else np.float32))
    return inputs.with_labels(labels, rows, num_labels=labels.numel())


def label_loss(
    module: nn.Module, batch: Batch, *, kind: LabelKind, label_smoothing: float = 0.0
) -> tuple[Float[Tensor, ""], int]:
    """Return the summed loss of a batch of labelled texts, and the number of labels.

    Args:
        module: a Transformer with a pooling head and one output per label.
        batch: a batch of texts; the label is a class, 1 or 0 for each class, or a number.
        kind: the kind of labels; selects cross-entropy, binary cross-entropy of each class, or squared error.
        label_smoothing: the share of the target spread evenly over the classes, or over yes and no; 0 for regression.

    Returns:
        The sum of the losses, in nats or as squared errors, and the number of labels.
    """
    assert isinstance(module, Transformer), "a model that predicts labels is a Transformer"
    logits_BL = run_batch(module, batch).float()
    match kind:
        case "single_label":
            loss = F.cross_entropy(logits_BL, batch.labels, reduction="sum", label_smoothing=label_smoothing)
        case "multi_label":
            targets_BL = batch.labels * (1.0 - label_smoothing) + label_smoothing / 2
            loss = F.binary_cross_entropy_with_logits(logits_BL, targets_BL, reduction="sum")
        case "regression":
            assert not label_smoothing, "regression has no label smoothing"
            loss = torch.square(logits_BL[:, 0] - batch.labels).sum()
        case _:
            assert_never(kind)
    return loss, batch.labels.numel()
