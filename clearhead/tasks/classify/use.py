"""Predictions and metrics of text classification: one label, several labels, or a number (regression).

Shape suffixes: N texts, L labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy import ndarray
from torch import Tensor
from torch.nn import functional as F

from clearhead.base.errors import InputError, nth_text
from clearhead.base.printing import Printed
from clearhead.base.progress import message
from clearhead.core import Transformer
from clearhead.data.batches.inputs import InputCollator, ModelInputs
from clearhead.data.stores.store import Store
from clearhead.generate.scoring.result import Measures, align_columns, f1_table, percent
from clearhead.spec.tasks.record import Repeats, TaskRecord
from clearhead.tasks.classify.data import DATA
from clearhead.tasks.classify.label_set import LabelSet
from clearhead.tasks.classify.store import is_paired, labels_of, prepare_labelled
from clearhead.tasks.evaluate.metrics import (
    F1Counts,
    accuracy,
    confusion_matrix,
    macro_f1,
    mean_squared_error,
    multi_label_scores,
    pearson,
    spearman,
)
from clearhead.tasks.evaluate.options import EvaluatedModel, EvaluateOptions
from clearhead.tasks.outputs import (
    Sides,
    check_finite,
    max_input_length,
    pooled_outputs,
    pooled_text_outputs,
    split_pairs,
)
from clearhead.tasks.use import collate_texts
from clearhead.text.tokenizer import Tokenizer


@dataclass(frozen=True, repr=False)
class Classification(Printed):
    """Prediction for one text.

    Args:
        label: the label, several labels separated by commas (possibly empty), or the number as text.
        probability: the probability of the label, or of exactly this set of independent labels; None for a number.
        probabilities: the probability of each label. They sum to 1 for a single-label model; empty for a number.
        labels: the predicted labels: one, or all with a probability of at least one half; empty for a number.
        value: the number that a regression model predicts; None for other models.
        is_cut: True if the text was truncated because it is longer than the model can read.
    """

    label: str
    probability: float | None
    probabilities: Mapping[str, float]
    labels: tuple[str, ...] = ()
    value: float | None = None
    is_cut: bool = False


def classify(
    module: Transformer,
    tokenizer: Tokenizer,
    record: TaskRecord,
    texts: Sequence[str] | Sequence[tuple[str, str]],
    *,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> list[Classification]:
    """Return the predicted labels of each text, or of each pair of texts.

    Args:
        module: the model; in training mode, a replica in evaluation mode runs in its place.
        tokenizer: the tokenizer of the model.
        record: the task record of the model.
        texts: the texts, none empty; pairs if the model was trained on pairs.
        batch_size: the maximum number of texts in a batch; None means that only `batch_tokens` limits it.
        batch_tokens: the maximum number of padded tokens in a batch; a longer text forms a separate batch. None means
            `read_tokens`.

    Raises:
        InputError: the model is not a classifier, or a text is empty, not a string, or not paired as in training.
        RunFailure: the model's outputs are not finite.
    """
    labels = check_classifier(module, record)
    if not texts:
        return []
    check_paired(record, is_paired=len(split_pairs(texts)) == 2)
    logits_NL, is_cut = pooled_text_outputs(
        module,
        InputCollator.of(module.spec, tokenizer, record.repeats),
        tokenizer,
        texts,
        max_length=max_input_length(module, record.max_length),
        width=labels.num_outputs,
        check=_refuse_empty,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
    )
    check_finite(logits_NL)
    return [
        replace(label, is_cut=cut) for label, cut in zip(_predictions(logits_NL, labels), is_cut.tolist(), strict=True)
    ]


def _refuse_empty(sides: Sides) -> None:
    """Refuse texts without tokens; the message names the first of them."""
    for side in sides:
        empty = next((number for number, ids in enumerate(side, start=1) if not len(ids)), None)
        if empty is not None:
            raise InputError(nth_text(empty) + " is empty; there is nothing to classify: remove it")


def check_classifier(module: Transformer, record: TaskRecord) -> LabelSet:
    """Return the label set of a classifier.

    Raises:
        InputError: the model is not a classifier; the message explains how to train one.
    """
    head = module.head
    if record.kind != "classify" or record.label_kind is None or head is None or not head.is_pooled:
        raise InputError(
            f"this model was trained to '{record.kind}', so it cannot predict labels: train it on "
            'labelled texts with [task] kind = "classify" and init = "…", the path of this model'
        )
    labels = LabelSet(record.label_kind, record.labels, record.number_mean, record.number_scale)
    outputs = module.spec.num_outputs
    if outputs != labels.num_outputs:
        raise InputError(
            f"the model has {outputs} outputs, but its record names {labels.num_outputs} labels; restore the files "
            "of the same model"
        )
    return labels


def check_paired(record: TaskRecord, *, is_paired: bool) -> None:
    """Raise an error if pairs are passed to a model of single texts, or single texts to a model of pairs.

    Raises:
        InputError: the inputs do not match the training data of the model.
    """
    if record.is_paired is None or record.is_paired == is_paired:
        return
    if record.is_paired:
        raise InputError("this model was trained on pairs of texts, got single texts; give two texts per prediction")
    raise InputError("this model was trained on single texts, got pairs; give one text per prediction")


def _predictions(logits_NL: Float[Tensor, "texts labels"], labels: LabelSet) -> list[Classification]:
    logits_NL = logits_NL.double()
    if labels.kind == "regression":
        values = (logits_NL[:, 0] * labels.scale + labels.mean).tolist()
        return [Classification(f"{value:.6g}", None, {}, value=value) for value in values]
    is_single = labels.kind == "single_label"
    rows = (logits_NL.softmax(1) if is_single else logits_NL.sigmoid()).tolist()
    predict = _single_label if is_single else _multi_label
    return [predict(dict(zip(labels.names, row, strict=True))) for row in rows]


def _single_label(probabilities: dict[str, float]) -> Classification:
    label = max(probabilities, key=lambda name: probabilities[name])
    return Classification(label, probabilities[label], probabilities, (label,))


def _multi_label(probabilities: dict[str, float]) -> Classification:
    labels = tuple(name for name, probability in probabilities.items() if probability >= 0.5)
    joint = float(np.prod([max(probability, 1 - probability) for probability in probabilities.values()]))
    return Classification(", ".join(labels), joint, probabilities, labels)


def predict(model: Any, texts: Sequence[Any], *, batch_size: int | None = None) -> list[Classification]:
    """Return the predicted labels of each text; see `Model.classify`."""
    labels: list[Classification] = model.classify(list(texts), batch_size=batch_size)
    return labels


def read_texts(texts: Sequence[str], collator: InputCollator, tokenizer: Tokenizer, task: TaskRecord) -> ModelInputs:
    """Return the model inputs for a text, or for a pair if the model was trained on pairs; see `collate_texts`."""
    check_paired(task, is_paired=len(texts) > 1)
    return collate_texts(texts, collator, tokenizer, task)


@dataclass(frozen=True, repr=False, eq=False)
class LabelMeasures(Measures):
    """Metrics of a single-label classifier.

    Args:
        texts: the number of texts.
        loss: the mean cross-entropy per label, in nats.
        accuracy: the share of texts with the right label, 0 to 1.
        macro_f1: the mean F1 of the labels that were expected or predicted, 0 to 1.
        labels: precision, recall, F1 and expected count of each label.
        confusion: the confusion matrix of counts; row = expected, column = predicted.
    """

    texts: int
    loss: float
    accuracy: float
    macro_f1: float
    labels: Mapping[str, Mapping[str, float | int | None]]
    confusion: Sequence[Sequence[int]]

    @property
    def score(self) -> float:
        """The validation score: accuracy times 100."""
        return 100 * self.accuracy

    def lines(self) -> list[str]:
        """Return the metrics as lines of text."""
        scores = align_columns({"accuracy": percent(self.accuracy), "macro F1": percent(self.macro_f1)})
        return [*scores, "", *f1_table("label", self.labels, "texts")]


@dataclass(frozen=True, repr=False, eq=False)
class MultiLabelMeasures(Measures):
    """Metrics of a multi-label classifier.

    Args:
        texts: the number of texts.
        loss: the mean binary cross-entropy per label, in nats.
        micro_f1: the F1 over all decisions together, 0 to 1.
        macro_f1: the mean F1 of the labels that were expected or predicted at least once, 0 to 1.
        exact: the share of texts whose labels are all right, 0 to 1.
    """

    texts: int
    loss: float
    micro_f1: float
    macro_f1: float
    exact: float

    @property
    def score(self) -> float:
        """The validation score: micro F1 times 100."""
        return 100 * self.micro_f1

    def lines(self) -> list[str]:
        """Return the metrics as lines of text."""
        exact = f"{percent(self.exact)} of the texts have exactly the right labels"
        return align_columns(
            {"micro F1": percent(self.micro_f1), "macro F1": percent(self.macro_f1), "exact match": exact}
        )


@dataclass(frozen=True, repr=False, eq=False)
class NumberMeasures(Measures):
    """Metrics of a regression model.

    Args:
        texts: the number of texts.
        loss: the mean squared error of the standardized numbers.
        spearman: the rank correlation, -1 to 1.
        pearson: the linear correlation, -1 to 1.
        mean_squared_error: the mean squared error, in the squared unit of the numbers.
    """

    texts: int
    loss: float
    spearman: float
    pearson: float
    mean_squared_error: float

    @property
    def score(self) -> float:
        """The validation score: Spearman's correlation times 100."""
        return 100 * self.spearman

    def lines(self) -> list[str]:
        """Return the metrics as lines of text."""
        rows = {"Spearman": f"{self.spearman:.4f}", "Pearson": f"{self.pearson:.4f}"}
        return align_columns({**rows, "mean squared error": f"{self.mean_squared_error:.6g}"})


ClassifyMeasures = LabelMeasures | MultiLabelMeasures | NumberMeasures


def measure(model: EvaluatedModel, data: object, options: EvaluateOptions) -> ClassifyMeasures:
    """Return the metrics of a classifier on labelled data.

    Raises:
        InputError: the model is not a classifier, or the data cannot be used or has other labels.
    """
    labels, tokenizer, task = check_classifier(model.tree, model.task), model.tokenizers.source, model.task
    source = DATA.source(data)
    max_length = max_input_length(model.tree, task.max_length)
    store = prepare_labelled(source, tokenizer, max_length=max_length, kind=labels.kind, labels=labels)
    check_paired(task, is_paired=is_paired(store))
    measures = measure_store(model.tree, tokenizer, store, batch_size=options.batch_size, repeats=task.repeats)
    message(store.report)
    return measures


def measure_store(
    module: Transformer,
    tokenizer: Tokenizer,
    store: Store,
    *,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    repeats: Repeats | None = None,
) -> ClassifyMeasures:
    """Predict the labels of prepared texts, and return the metrics.

    Args:
        module: a model with one output per label; in training mode, a replica in evaluation mode runs in its place.
        tokenizer: the tokenizer of the store.
        store: the store of the texts.
        batch_size, batch_tokens: the limits of a batch, see `classify`.
        repeats: the field `repeats` of the model's task record.
    """
    collator = InputCollator.of(module.spec, tokenizer, repeats)
    labels, expected = labels_of(store), np.array(store.arrays["labels"])
    sides: Sides = [[text[row] for row in range(len(store))] for text in store.texts]
    sizes = {"batch_size": batch_size, "batch_tokens": batch_tokens}
    logits_NL = pooled_outputs(module, collator, sides, width=labels.num_outputs, **sizes)
    values = torch.from_numpy(expected)
    match labels.kind:
        case "single_label":
            loss = float(F.cross_entropy(logits_NL, values))
            return _label_measures(logits_NL.argmax(1).numpy(), expected, labels, loss)
        case "multi_label":
            loss = float(F.binary_cross_entropy_with_logits(logits_NL, values))
            # A label is predicted if its probability is at least one half, that is, if its logit is at least 0.
            scores = multi_label_scores((logits_NL >= 0).numpy(), expected > 0)
            return MultiLabelMeasures(len(store), loss, scores.micro_f1, scores.macro_f1, scores.exact)
        case "regression":
            loss = float(F.mse_loss(logits_NL[:, 0].double(), values))
            pair = [np.asarray(side, np.float64) * labels.scale + labels.mean for side in (logits_NL[:, 0], expected)]
            return NumberMeasures(len(store), loss, spearman(*pair), pearson(*pair), mean_squared_error(*pair))


def _label_measures(
    predicted_N: Int64[ndarray, " texts"], expected_N: Int64[ndarray, " texts"], labels: LabelSet, loss: float
) -> LabelMeasures:
    confusion_LL = confusion_matrix(predicted_N, expected_N, num_labels=labels.num_outputs)
    counts = np.stack([confusion_LL.sum(1), confusion_LL.sum(0), np.diag(confusion_LL)], 1).tolist()
    by_label = {name: F1Counts(*row).record(undefined=None) for name, row in zip(labels.names, counts, strict=True)}
    scores = accuracy(predicted_N, expected_N), macro_f1(confusion_LL)
    return LabelMeasures(len(expected_N), loss, *scores, by_label, confusion_LL.tolist())
