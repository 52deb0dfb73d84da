"""Classification of texts: one label, several labels, or a number (regression).

Shape suffixes: N texts, L labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float
from torch import Tensor

from clearhead.core import Transformer
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.stores.label_set import LabelSet
from clearhead.errors import InputError, nth_text
from clearhead.predict.outputs import check_finite, encode_sides, max_input_length, pooled_outputs
from clearhead.printing import Printed
from clearhead.task import TaskRecord
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
        replace(found, is_cut=cut) for found, cut in zip(_predictions(logits_NL, labels), is_cut.tolist(), strict=True)
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
