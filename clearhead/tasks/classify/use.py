"""Labels of texts - one, several, or a number (regression) - and how good they are.

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
from clearhead.tasks.outputs import Sides, check_finite, encode_sides, max_input_length, pooled_outputs
from clearhead.tasks.use import collate_texts
from clearhead.text.tokenizer import Tokenizer


@dataclass(frozen=True, repr=False)
class Classification(Printed):
    """The prediction for one text.

    Args:
        label: the label; several labels separated by commas, possibly none; or the number as text.
        probability: of the label; of exactly this set of labels, each decided independently; None for a number.
        probabilities: of each label; they sum to 1 for a single-label model; empty for a number.
        labels: the predicted labels: one, or those with a probability of at least one half; empty for a number.
        value: the number that a regression model predicts.
        is_cut: the text was truncated, because it is longer than the model reads.
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
    """Return the label of each text, or of each pair of texts.

    Args:
        module: one in training runs as a replica in evaluation mode.
        tokenizer: the tokenizer it was trained with.
        record: the task it was trained for.
        texts: none empty; pairs if it was trained on pairs.
        batch_size: most texts of one batch; None: no limit but the tokens.
        batch_tokens: most padded tokens of one batch, None: `read_tokens`; a longer text is a batch of its own.

    Raises:
        InputError: the model is not a classifier, or a text is empty, not a string, or not paired as in training.
        RunFailure: the model's outputs are not finite.
    """
    labels = check_classifier(module, record)
    if not texts:
        return []
    sides, is_cut = encode_sides(tokenizer, texts, max_input_length(module, record.max_length))
    check_paired(record, is_paired=len(sides) == 2)
    for side in sides:
        empty = next((number for number, ids in enumerate(side, start=1) if not len(ids)), None)
        if empty is not None:
            raise InputError(nth_text(empty) + " is empty; there is nothing to classify")
    collator = InputCollator.of(module.spec, tokenizer, record.repeats)
    logits_NL = pooled_outputs(
        module, collator, sides, width=labels.num_outputs, batch_size=batch_size, batch_tokens=batch_tokens
    )
    check_finite(logits_NL)
    return [
        replace(label, is_cut=cut) for label, cut in zip(_predictions(logits_NL, labels), is_cut.tolist(), strict=True)
    ]


def check_classifier(module: Transformer, record: TaskRecord) -> LabelSet:
    """Return the labels of a classifier.

    Raises:
        InputError: the model is not a classifier; the message says how to train one.
    """
    head = module.head
    if record.kind != "classify" or record.label_kind is None or head is None or not head.is_pooled:
        raise InputError(
            f"this model was trained to '{record.kind}', so it knows no labels and would only guess: train it on "
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
    """Refuse pairs for a model trained on single texts, and single texts for one trained on pairs.

    Raises:
        InputError: they do not match.
    """
    if record.is_paired is None or record.is_paired == is_paired:
        return
    if record.is_paired:
        raise InputError("this model was trained on pairs of texts; give two texts for each answer")
    raise InputError("this model was trained on single texts, but received pairs; give one text for each answer")


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
    """Return the label of each text; see `Model.classify`."""
    labels: list[Classification] = model.classify(list(texts), batch_size=batch_size)
    return labels


def read_texts(texts: Sequence[str], collator: InputCollator, tokenizer: Tokenizer, task: TaskRecord) -> ModelInputs:
    """Return what a model reads of a text, or of a pair where it was trained on pairs; see `collate_texts`."""
    check_paired(task, is_paired=len(texts) > 1)
    return collate_texts(texts, collator, tokenizer, task)


@dataclass(frozen=True, repr=False, eq=False)
class LabelMeasures(Measures):
    """How good predictions of one label for each text are.

    Args:
        texts: their number.
        loss: of a label, in nats.
        accuracy: share of texts whose label is right, 0 to 1.
        macro_f1: mean F1 of the labels that were expected or predicted, 0 to 1.
        labels: precision, recall, F1 and expected count of each.
        confusion: counts, row = expected, column = predicted.
    """

    texts: int
    loss: float
    accuracy: float
    macro_f1: float
    labels: Mapping[str, Mapping[str, float | int | None]]
    confusion: Sequence[Sequence[int]]

    @property
    def score(self) -> float:
        """The score of a validation: accuracy times 100."""
        return 100 * self.accuracy

    def lines(self) -> list[str]:
        """Return the numbers for a person."""
        scores = align_columns({"accuracy": percent(self.accuracy), "macro F1": percent(self.macro_f1)})
        return [*scores, "", *f1_table("label", self.labels, "texts")]


@dataclass(frozen=True, repr=False, eq=False)
class MultiLabelMeasures(Measures):
    """How good predictions of several labels for each text are.

    Args:
        texts: their number.
        loss: of a label, binary cross-entropy in nats.
        micro_f1: F1 of all decisions together, 0 to 1.
        macro_f1: mean F1 of the labels that were expected or predicted at least once, 0 to 1.
        exact: share of texts whose labels are all right, 0 to 1.
    """

    texts: int
    loss: float
    micro_f1: float
    macro_f1: float
    exact: float

    @property
    def score(self) -> float:
        """The score of a validation: micro F1 times 100."""
        return 100 * self.micro_f1

    def lines(self) -> list[str]:
        """Return the numbers for a person."""
        exact = f"{percent(self.exact)} of the texts have exactly their labels"
        return align_columns(
            {"micro F1": percent(self.micro_f1), "macro F1": percent(self.macro_f1), "exact match": exact}
        )


@dataclass(frozen=True, repr=False, eq=False)
class NumberMeasures(Measures):
    """How good predicted numbers are.

    Args:
        texts: their number.
        loss: mean squared difference of standardised numbers.
        spearman: rank correlation, -1 to 1.
        pearson: linear correlation, -1 to 1.
        mean_squared_error: in the squared unit of the numbers.
    """

    texts: int
    loss: float
    spearman: float
    pearson: float
    mean_squared_error: float

    @property
    def score(self) -> float:
        """The score of a validation: Spearman's correlation times 100."""
        return 100 * self.spearman

    def lines(self) -> list[str]:
        """Return the numbers for a person."""
        rows = {"Spearman": f"{self.spearman:.4f}", "Pearson": f"{self.pearson:.4f}"}
        return align_columns({**rows, "mean squared error": f"{self.mean_squared_error:.6g}"})


ClassifyMeasures = LabelMeasures | MultiLabelMeasures | NumberMeasures


def measure(model: EvaluatedModel, data: object, options: EvaluateOptions) -> ClassifyMeasures:
    """Measure how well a classifier predicts the labels or numbers of texts.

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
    """Run a model over prepared texts and measure its predictions.

    Args:
        module: its head gives one output for each label; one in training runs as a replica in evaluation mode.
        tokenizer: the tokenizer of the store.
        store: the texts.
        batch_size, batch_tokens: as for `classify`.
        repeats: as in the model's task record.
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
            # Those with a probability of at least one half are predicted.
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
