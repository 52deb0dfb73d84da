"""What the uses of several tasks share: evaluation data, texts as a model reads them, and measures of running text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from clearhead.base.errors import InputError
from clearhead.base.progress import message
from clearhead.data.batches.inputs import InputCollator, ModelInputs
from clearhead.data.batches.text import Objective, window_epoch
from clearhead.data.sources.pairs import read_pairs
from clearhead.data.sources.tables import DataTable
from clearhead.data.stores.corpus import Corpus, prepare_corpus
from clearhead.data.task_tables import data_of
from clearhead.generate.batching import device_of
from clearhead.generate.scoring.result import Measures, align_columns, percent
from clearhead.generate.scoring.token_accuracy import score_tokens
from clearhead.spec.describe import count_noun
from clearhead.spec.tasks.record import Noise, TaskRecord
from clearhead.tasks.evaluate.options import EvaluatedModel
from clearhead.text.tokenizer import Tokenizer


def pairs_of(data: object, kind: str) -> DataTable:
    """Return evaluation data that are pairs of texts; otherwise as `TaskData.source`."""
    return read_pairs(data_of(kind).source(data))


def finite_or_none(value: float) -> float | None:
    """Return a number, or None where JSON has none."""
    return value if math.isfinite(value) else None


def collate_texts(texts: Sequence[str], collator: InputCollator, tokenizer: Tokenizer, task: TaskRecord) -> ModelInputs:
    """Return what a model reads of a text, or of a pair of texts.

    A task that reads texts in another way for its predictions has a function `read_texts` with these arguments.

    Args:
        texts: the text, or both.
        collator: how the model reads texts.
        tokenizer: of the model.
        task: what it was trained for.
    """
    return collator.collate(*([tokenizer.encode(text)] for text in texts))


def refuse_pair(texts: Sequence[str], task: TaskRecord) -> None:
    """Refuse a pair of texts for a model that reads single ones.

    Raises:
        InputError: there are two.
    """
    if len(texts) > 1:
        raise InputError(f"this model was trained to '{task.kind}' single texts, but received a pair: give one text")


@dataclass(frozen=True, repr=False, eq=False)
class HiddenTokenMeasures(Measures):
    """How well a model predicts the tokens that are hidden from it.

    Args:
        loss: of a hidden token, in nats.
        perplexity: exp(loss).
        accuracy: share of the hidden tokens that the model ranks first, 0 to 1.
    """

    loss: float
    perplexity: float
    accuracy: float

    def lines(self) -> list[str]:
        """Return the numbers for a person."""
        return align_columns(
            {
                "loss": f"{self.loss:.4f} nats per hidden token",
                "perplexity": f"{self.perplexity:.3f}",
                "accuracy": f"{percent(self.accuracy)} of the hidden tokens come first",
            }
        )


def corpus_of(model: EvaluatedModel, data: object) -> Corpus:
    """Return the tokenized text of evaluation data, and say how much it is."""
    corpus = prepare_corpus(data_of(model.task.kind).source(data), model.tokenizers.source)
    message(f"{corpus.num_tokens:,} tokens in {count_noun(len(corpus), 'document')}")
    return corpus


def noise_of(model: EvaluatedModel) -> Noise:
    """Return the noise that a model learned to mend.

    Hugging Face checkpoints do not name it; for them it is the one of the papers.

    Raises:
        InputError: the task record of a model that was trained here does not say it.
    """
    if model.task.noise is not None:
        return model.task.noise
    if model.hf_checkpoint is None:
        raise InputError("the record of this model does not say how the text was damaged that it learned to mend")
    if model.module.spec.decoder is None:
        return Noise(kind="mask", share=0.15)
    if model.tokenizers.source.sentinel_ids:
        return Noise(kind="spans", share=0.15, mean_span=3.0)
    return Noise(kind="infill", share=0.3, mean_span=3.0)


def measure_hidden_tokens(
    model: EvaluatedModel, corpus: Corpus, objective: Objective, batch_size: int | None
) -> HiddenTokenMeasures:
    """Measure the loss of the tokens that an objective hides; the same ones are hidden for every size of batches.

    Raises:
        InputError: the task record does not say how long the training texts were.
    """
    length = model.task.max_length or model.module.max_positions
    if length is None:
        raise InputError("the record of this model does not say how long the texts were that it was trained on")
    batches = window_epoch(corpus, objective, length=length)
    smaller = (batch for whole in batches for batch in whole.split_rows(batch_size))
    with torch.inference_mode():
        tokens = score_tokens(model.tree, smaller, device_of(model.module))
    assert tokens.score is not None, "tokens have a score"
    return HiddenTokenMeasures(tokens.loss, math.exp(min(tokens.loss, 700.0)), tokens.score / 100)
