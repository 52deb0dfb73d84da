"""The label of a text: a class, several of them, or a number.

Shape suffixes: N texts, B texts of a batch, L labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.core import Transformer
from clearhead.data.batches.base import Batch
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.sources.labelled import LabelledSource
from clearhead.data.stores.label_set import LabelSet
from clearhead.data.stores.labelled import prepare_labelled, truncate_pair
from clearhead.errors import InputError, RunFailure
from clearhead.evaluate.labels import Judged, judge_labelled, label_logits
from clearhead.generate.batching import batches_by_cost, read_tokens
from clearhead.task import TaskRecord
from clearhead.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Classification:
    """What a model says of one text.

    Args:
        label: the class; several with commas between them, which may be none; or the number as text.
        probability: of the class; of exactly these of several, each decided on its own; None for a number.
        probabilities: of each class, which sum to one where a text has one class; empty for a number.
        labels: the classes given: one, or those whose probability is at least one half; empty for a number.
        value: the number, where the model gives one.
        is_cut: only the front of the text was read, because it is longer than what the model was trained on.
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
        module: used in evaluation mode, its own mode is restored.
        tokenizer: what it was trained with.
        record: what it was trained for.
        texts: none empty; pairs where it was trained on pairs.
        batch_size: most texts of one batch; None: only the tokens count.
        batch_tokens: most padded tokens of one batch, None: `read_tokens`; a longer text is a batch of its own.

    Raises:
        InputError: the model was not trained to classify, or a text is empty, no text, or not paired as in training.
        RunFailure: the model's outputs are not finite.
    """
    labels = check_classifier(module, record)
    columns = _columns(texts, is_paired=record.is_paired)
    if not columns[0]:
        return []
    sides = [[np.array(ids, dtype=np.int64) for ids in tokenizer.encode_batch(column)] for column in columns]
    for side in sides:
        empty = next((number for number, ids in enumerate(side, start=1) if not len(ids)), None)
        if empty is not None:
            raise InputError(f"text {empty} is empty; there is nothing to classify")
    collator = InputCollator.of(module.spec, tokenizer, record.repeats)
    kept, is_cut = _cut(sides, max_length_of(module, record), collator)
    budget = batch_tokens or read_tokens(module)
    batches = _batches(kept, collator, batch_size=batch_size, batch_tokens=budget)
    logits_NL = label_logits(module, batches, len(kept[0]))
    if not bool(torch.isfinite(logits_NL).all()):
        raise RunFailure("the model's outputs are not finite: its weights are damaged, or training diverged")
    answers = _answers(logits_NL, labels)
    return [
        Classification(**{**vars(answer), "is_cut": cut}) if cut else answer
        for answer, cut in zip(answers, is_cut, strict=True)
    ]


def evaluate_labelled(
    module: Transformer,
    tokenizer: Tokenizer,
    record: TaskRecord,
    source: LabelledSource,
    *,
    batch_tokens: int | None = None,
) -> tuple[Judged, str]:
    """Return how well a model labels the texts of a source, and in words which of them were used.

    Args:
        module: used in evaluation mode, its own mode is restored.
        tokenizer: what it was trained with.
        record: what it was trained for.
        source: labelled texts.
        batch_tokens: most padded tokens of one batch, None: `read_tokens`; raised to the longest text where that is
            longer.

    Raises:
        InputError: the model was not trained to classify, or the source is unusable or has other labels.
    """
    labels = check_classifier(module, record)
    max_length = max_length_of(module, record) or int(np.iinfo(np.int32).max)
    store = prepare_labelled(source, tokenizer, max_length=max_length, kind=labels.kind, labels=labels)
    if record.is_paired is not None and store.is_paired != record.is_paired:
        raise InputError(_unpaired(record.is_paired))
    budget = max(batch_tokens or read_tokens(module), int(store.lengths.max()))
    return judge_labelled(module, tokenizer, store, batch_tokens=budget, repeats=record.repeats), str(store.report)


def check_classifier(module: Transformer, record: TaskRecord) -> LabelSet:
    """Return the labels that a model gives.

    Raises:
        InputError: it was not trained to give any; the sentence says what to train.
    """
    head = module.head
    if record.kind != "classify" or record.label_kind is None or head is None or not head.is_pooled:
        raise InputError(
            f"this model was trained to '{record.kind}', so it knows no labels and would only guess: train it on "
            'labelled texts with [task] kind = "classify" and init = "…", the path of this model'
        )
    labels = LabelSet(record.label_kind, record.labels, record.number_mean, record.number_scale)
    outputs = head.projection().weight_VD.shape[0]
    if outputs != labels.num_outputs:
        raise InputError(
            f"the model has {outputs} outputs, but its record names {labels.num_outputs} labels; restore the files of "
            "the same model"
        )
    return labels


def max_length_of(module: Transformer, record: TaskRecord) -> int | None:
    """Return the longest sequence that a model should read, special ids included; None: any."""
    limits = [limit for limit in (record.max_length, module.max_positions) if limit is not None]
    return min(limits, default=None)


def _columns(texts: Sequence[str] | Sequence[tuple[str, str]], *, is_paired: bool | None) -> list[list[str]]:
    """Return the first texts, and the second ones where there are pairs."""
    if isinstance(texts, str):
        raise InputError("classify() takes a list of texts; put the single text into a list")
    if is_paired is None:
        is_paired = any(not isinstance(text, str) for text in texts)
        if is_paired and any(isinstance(text, str) for text in texts):
            raise InputError("expected texts or pairs of texts, received both")
    columns: list[list[str]] = [[], []] if is_paired else [[]]
    for text in texts:
        if is_paired == isinstance(text, str):
            raise InputError(_unpaired(is_paired))
        parts = [text] if isinstance(text, str) else list(text)
        if len(parts) != len(columns):
            raise InputError(f"a pair holds two texts, received {len(parts)}")
        for column, part in zip(columns, parts, strict=True):
            column.append(part)
    return columns


def _unpaired(is_paired: bool) -> str:
    if is_paired:
        return "this model was trained on pairs of texts; give two texts for each answer"
    return "this model was trained on single texts, but received pairs; give one text for each answer"


def _cut(
    sides: list[list[np.ndarray]], max_length: int | None, collator: InputCollator
) -> tuple[list[list[np.ndarray]], list[bool]]:
    """Keep the front of texts that are too long, as in training."""
    if max_length is None:
        return sides, [False] * len(sides[0])
    room = max_length - collator.special_tokens.num_added(paired=len(sides) == 2)
    lengths = [np.array([len(ids) for ids in side]) for side in sides]
    kept = [np.minimum(lengths[0], room)] if len(sides) == 1 else list(truncate_pair(lengths[0], lengths[1], room))
    is_cut = np.any([now < before for now, before in zip(kept, lengths, strict=True)], axis=0)
    fronts = [
        [ids[:count] for ids, count in zip(side, now, strict=True)] for side, now in zip(sides, kept, strict=True)
    ]
    return fronts, is_cut.tolist()


def _batches(
    sides: list[list[np.ndarray]], collator: InputCollator, *, batch_size: int | None, batch_tokens: int
) -> Iterator[Batch]:
    extra = collator.special_tokens.num_added(paired=len(sides) == 2)
    lengths = [sum(map(len, texts)) + extra for texts in zip(*sides, strict=True)]
    for rows in batches_by_cost(lengths, budget=batch_tokens, most_rows=batch_size):
        chosen = [[side[row] for row in rows] for side in sides]
        rectangle = collator.collate(chosen[0], chosen[1] if len(chosen) == 2 else None)
        yield Batch(
            ids=rectangle.ids,
            mask=rectangle.mask,
            labels=torch.zeros(len(rows), dtype=torch.int64),
            num_labels=0,
            num_tokens=rectangle.num_tokens,
            rows=np.array(rows, dtype=np.int64),
            target_ids=rectangle.target_ids,
            target_mask=rectangle.target_mask,
            segments=rectangle.segments,
        )


def _answers(logits_NL: Float[Tensor, "texts labels"], labels: LabelSet) -> list[Classification]:
    logits_NL = logits_NL.double()
    if labels.kind == "regression":
        values = (logits_NL[:, 0] * labels.scale + labels.mean).tolist()
        return [Classification(f"{value:.6g}", None, {}, value=value) for value in values]
    if labels.kind == "single_label":
        rows = logits_NL.softmax(1).tolist()
        return [_one(dict(zip(labels.names, row, strict=True))) for row in rows]
    return [_several(dict(zip(labels.names, row, strict=True))) for row in logits_NL.sigmoid().tolist()]


def _one(probabilities: dict[str, float]) -> Classification:
    label = max(probabilities, key=lambda name: probabilities[name])
    return Classification(label, probabilities[label], probabilities, (label,))


def _several(probabilities: dict[str, float]) -> Classification:
    given = tuple(name for name, probability in probabilities.items() if probability >= 0.5)
    exactly = float(np.prod([max(probability, 1 - probability) for probability in probabilities.values()]))
    return Classification(", ".join(given), exactly, probabilities, given)
