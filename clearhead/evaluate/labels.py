"""How well a model predicts the labels of texts.

Shape suffixes: N texts, L labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy import ndarray
from torch import Tensor
from torch.nn import functional as F

from clearhead.core import Transformer
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.sources.tables import TableSource
from clearhead.data.stores.labelled import LabelStore, prepare_labelled
from clearhead.evaluate.metrics import (
    MultiLabelScores,
    accuracy,
    confusion_matrix,
    macro_f1,
    mean_squared_error,
    multi_label_scores,
    pearson,
    spearman,
)
from clearhead.predict.classify import check_classifier, check_paired
from clearhead.predict.outputs import max_input_length, pooled_outputs
from clearhead.task import Repeats, TaskRecord
from clearhead.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class SingleLabelScores:
    """Scores of single-label predictions.

    Args:
        accuracy: share of texts whose label is right, 0 to 1.
        macro_f1: mean F1 of the labels that were expected or predicted, 0 to 1.
        confusion_LL: counts, row = expected, column = predicted.
    """

    accuracy: float
    macro_f1: float
    confusion_LL: Int64[ndarray, "labels labels"]


@dataclass(frozen=True)
class RegressionScores:
    """Scores of predicted numbers.

    Args:
        spearman: rank correlation, -1 to 1.
        pearson: linear correlation, -1 to 1.
        mean_squared_error: in the squared unit of the numbers.
    """

    spearman: float
    pearson: float
    mean_squared_error: float


LabelScores = SingleLabelScores | MultiLabelScores | RegressionScores


@dataclass(frozen=True)
class LabelEvaluation:
    """What a model reaches on labelled texts.

    Args:
        loss: mean over labels, as in training but without label smoothing.
        scores: by the kind of the labels.
        num_texts: texts used.
        report: which texts of the source were used, as a sentence.
    """

    loss: float
    scores: LabelScores
    num_texts: int
    report: str


def evaluate_labels(
    module: Transformer,
    tokenizer: Tokenizer,
    record: TaskRecord,
    source: TableSource,
    *,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> LabelEvaluation:
    """Run a classifier over the texts of a source and score it.

    Args:
        module: used in evaluation mode, its own mode is restored.
        tokenizer: the tokenizer it was trained with.
        record: the task it was trained for.
        source: labelled texts.
        batch_size: most texts of one batch; None: no limit but the tokens.
        batch_tokens: most padded tokens of one batch, None: `read_tokens`; a longer text is a batch of its own.

    Raises:
        InputError: the model is not a classifier, or the source is unusable or has other labels.
    """
    labels = check_classifier(module, record)
    max_length = max_input_length(module, record.max_length)
    store = prepare_labelled(source, tokenizer, max_length=max_length, kind=labels.kind, labels=labels)
    check_paired(record, is_paired=store.is_paired)
    sizes = {"batch_size": batch_size, "batch_tokens": batch_tokens}
    return evaluate_label_store(module, tokenizer, store, **sizes, repeats=record.repeats)


def evaluate_label_store(
    module: Transformer,
    tokenizer: Tokenizer,
    store: LabelStore,
    *,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    repeats: Repeats | None = None,
) -> LabelEvaluation:
    """Run a model over prepared texts and score it.

    Args:
        module: its head gives one output for each label; used in evaluation mode, its own mode is restored.
        tokenizer: the tokenizer of the store.
        store: the texts.
        batch_size, batch_tokens: as for `evaluate_labels`.
        repeats: as in the model's task record.
    """
    collator = InputCollator.of(module.spec, tokenizer, repeats)
    sides = [list(side) for side in zip(*map(store.ids, range(len(store))), strict=True)]
    sizes = {"batch_size": batch_size, "batch_tokens": batch_tokens}
    logits_NL = pooled_outputs(module, collator, sides, width=store.labels.num_outputs, **sizes)
    return LabelEvaluation(_loss(logits_NL, store), _scores(logits_NL, store), len(store), str(store.report))


def _loss(logits_NL: Float[Tensor, "texts labels"], store: LabelStore) -> float:
    """Return the mean loss of a label: cross-entropy in nats, or the squared difference of numbers."""
    values = torch.from_numpy(np.array(store.values))
    match store.labels.kind:
        case "single_label":
            return float(F.cross_entropy(logits_NL, values))
        case "multi_label":
            return float(F.binary_cross_entropy_with_logits(logits_NL, values))
        case "regression":
            return float(F.mse_loss(logits_NL[:, 0].double(), values))


def _scores(logits_NL: Float[Tensor, "texts labels"], store: LabelStore) -> LabelScores:
    """Return scores; of several labels, those with a probability of at least one half are predicted."""
    labels, expected = store.labels, np.array(store.values)
    match labels.kind:
        case "single_label":
            predicted_N = logits_NL.argmax(1).numpy()
            confusion_LL = confusion_matrix(predicted_N, expected, num_labels=labels.num_outputs)
            return SingleLabelScores(accuracy(predicted_N, expected), macro_f1(confusion_LL), confusion_LL)
        case "multi_label":
            return multi_label_scores((logits_NL >= 0).numpy(), expected > 0)
        case "regression":
            pair = [np.asarray(side, np.float64) * labels.scale + labels.mean for side in (logits_NL[:, 0], expected)]
            return RegressionScores(spearman(*pair), pearson(*pair), mean_squared_error(*pair))


def main_score(scores: LabelScores) -> float:
    """Return the score of a validation: accuracy, micro F1 or Spearman's correlation, times 100."""
    match scores:
        case SingleLabelScores():
            return 100 * scores.accuracy
        case MultiLabelScores():
            return 100 * scores.micro_f1
        case RegressionScores():
            return 100 * scores.spearman
