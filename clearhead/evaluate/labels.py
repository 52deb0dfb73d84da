"""What a model says of labelled texts, and how good that is.

Shape suffixes: N texts, L labels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy import ndarray
from torch import Tensor
from torch.nn import functional as F

from clearhead.core import Transformer
from clearhead.data.batches.base import Batch
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.batches.labelled import labelled_epoch
from clearhead.data.stores.label_set import LabelSet
from clearhead.data.stores.labelled import LabelStore
from clearhead.evaluate.metrics import (
    SeveralScores,
    accuracy,
    confusion_matrix,
    macro_f1,
    mean_squared_error,
    pearson,
    several_scores,
    spearman,
)
from clearhead.generate.batching import device_of, evaluation_mode
from clearhead.task import Repeats
from clearhead.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ClassScores:
    """How often the one class of each text was met.

    Args:
        accuracy: the share of texts, 0 to 1.
        macro_f1: the mean F1 of the classes that were expected or predicted, 0 to 1.
        confusion_LL: counts, row = expected, column = predicted.
    """

    accuracy: float
    macro_f1: float
    confusion_LL: Int64[ndarray, "labels labels"]


@dataclass(frozen=True)
class NumberScores:
    """How near numbers came.

    Args:
        spearman: the correlation of ranks, -1 to 1.
        pearson: the linear correlation, -1 to 1.
        mean_squared_error: in the unit of the numbers, squared.
    """

    spearman: float
    pearson: float
    mean_squared_error: float


LabelScores = ClassScores | SeveralScores | NumberScores


@dataclass(frozen=True)
class Judged:
    """A model's outputs for labelled texts.

    Args:
        logits_NL: one row for each text of the store, in its order.
        loss: of a label on average, as in training but without label smoothing.
        scores: by what a label is.
    """

    logits_NL: Float[Tensor, "texts labels"]
    loss: float
    scores: LabelScores


def judge_labelled(
    module: Transformer,
    tokenizer: Tokenizer,
    store: LabelStore,
    *,
    batch_tokens: int,
    repeats: Repeats | None = None,
) -> Judged:
    """Run a model over labelled texts.

    Args:
        module: its head gives one output for each label; used in evaluation mode, its own mode is restored.
        tokenizer: what the store was made with.
        store: the texts.
        batch_tokens: most padded tokens of one batch.
        repeats: what the record of its task says of its decoder.

    Raises:
        InputError: a text is longer than the budget, or than the model's positions.
    """
    collator = InputCollator.of(module.spec, tokenizer, repeats)
    logits_NL = label_logits(module, labelled_epoch(store, collator, batch_tokens=batch_tokens), len(store))
    return Judged(logits_NL, label_loss_of(logits_NL, store), score_labels(logits_NL, store))


def label_logits(module: Transformer, batches: Iterable[Batch], count: int) -> Float[Tensor, "texts labels"]:
    """Return a model's outputs for whole texts, each in the row that its batch names.

    Args:
        module: its head pools; used in evaluation mode, its own mode is restored.
        batches: every text once.
        count: texts in all.

    Returns:
        float32, on the CPU.
    """
    device, found = device_of(module), None
    with evaluation_mode(module), torch.inference_mode():
        for batch in batches:
            logits_BL = label_outputs(module, batch.to(device)).float().cpu()
            if found is None:
                found = torch.empty(count, logits_BL.shape[1])
            found[torch.from_numpy(batch.rows)] = logits_BL
    assert found is not None, "a store holds a text"
    return found


def label_outputs(module: Transformer, batch: Batch) -> Float[Tensor, "batch labels"]:
    """Return one output of each text of a batch for each label.

    Args:
        module: its head pools.
        batch: on the module's device.
    """
    out = module(batch.ids, batch.target_ids, mask=batch.mask, target_mask=batch.target_mask, segments=batch.segments)
    logits_BL: Tensor | None = out.logits
    assert logits_BL is not None, "a model that classifies has a head"
    return logits_BL


def label_loss_of(logits_NL: Float[Tensor, "texts labels"], store: LabelStore) -> float:
    """Return the loss of a label on average: of a class or a decision in nats, or of a number as squared difference.

    Args:
        logits_NL: outputs for each text of the store.
        store: the labels.
    """
    values = torch.from_numpy(np.array(store.values))
    if store.labels.kind == "single_label":
        return float(F.cross_entropy(logits_NL, values))
    if store.labels.kind == "multi_label":
        return float(F.binary_cross_entropy_with_logits(logits_NL, values))
    return float(F.mse_loss(logits_NL[:, 0].double(), values))


def score_labels(logits_NL: Float[Tensor, "texts labels"], store: LabelStore) -> LabelScores:
    """Return how well outputs meet the labels of a store; several labels are given from a probability of one half on.

    Args:
        logits_NL: outputs for each text of the store.
        store: the labels.
    """
    labels = store.labels
    if labels.kind == "single_label":
        predicted_N, expected_N = logits_NL.argmax(1).numpy(), np.array(store.values)
        confusion_LL = confusion_matrix(predicted_N, expected_N, num_labels=labels.num_outputs)
        return ClassScores(accuracy(predicted_N, expected_N), macro_f1(confusion_LL), confusion_LL)
    if labels.kind == "multi_label":
        return several_scores((logits_NL >= 0).numpy(), np.array(store.values) > 0)
    return _score_numbers(logits_NL, store, labels)


def _score_numbers(logits_NL: Tensor, store: LabelStore, labels: LabelSet) -> NumberScores:
    predicted_N, expected_N = (
        np.asarray(values, np.float64) * labels.scale + labels.mean for values in (logits_NL[:, 0], store.values)
    )
    return NumberScores(
        spearman=spearman(predicted_N, expected_N),
        pearson=pearson(predicted_N, expected_N),
        mean_squared_error=mean_squared_error(predicted_N, expected_N),
    )


def main_score(scores: LabelScores) -> float:
    """Return the one number that a validation is judged by: accuracy, micro F1 or Spearman, times 100."""
    match scores:
        case ClassScores():
            return 100 * scores.accuracy
        case SeveralScores():
            return 100 * scores.micro_f1
        case NumberScores():
            return 100 * scores.spearman
