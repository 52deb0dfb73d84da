"""Shared code for the use of tasks: evaluation data, model inputs for texts, and metrics of hidden tokens."""

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
    """Read the pairs of texts in evaluation data; see `TaskData.source` for the formats of `data`."""
    return read_pairs(data_of(kind).source(data))


def finite_or_none(value: float) -> float | None:
    """Return a finite number unchanged, and None for NaN or infinity, which JSON cannot hold."""
    return value if math.isfinite(value) else None


def collate_texts(texts: Sequence[str], collator: InputCollator, tokenizer: Tokenizer, task: TaskRecord) -> ModelInputs:
    """Return the model inputs for a text, or for a pair of texts.

    A task whose predictions read texts differently defines a function `read_texts` with the same arguments.

    Args:
        texts: the text, or both texts of the pair.
        collator: the collator of the model's inputs.
        tokenizer: the tokenizer of the model.
        task: the task record of the model.
    """
    return collator.collate(*([tokenizer.encode(text)] for text in texts))


def refuse_pair(texts: Sequence[str], task: TaskRecord) -> None:
    """Raise an error if a pair is passed to a model that reads single texts.

    Raises:
        InputError: there are two texts.
    """
    if len(texts) > 1:
        raise InputError(f"this model was trained to '{task.kind}' single texts, got a pair; give one text")


@dataclass(frozen=True, repr=False, eq=False)
class HiddenTokenMeasures(Measures):
    """Metrics of a model that predicts hidden tokens.

    Args:
        loss: the mean loss per hidden token, in nats.
        perplexity: exp(loss).
        accuracy: the share of the hidden tokens that the model ranks first, 0 to 1.
    """

    loss: float
    perplexity: float
    accuracy: float

    def lines(self) -> list[str]:
        """Return the metrics as lines of text."""
        return align_columns(
            {
                "loss": f"{self.loss:.4f} nats per hidden token",
                "perplexity": f"{self.perplexity:.3f}",
                "accuracy": f"{percent(self.accuracy)} of the hidden tokens are ranked first",
            }
        )


def corpus_of(model: EvaluatedModel, data: object) -> Corpus:
    """Tokenize running text to evaluate a model on it, and print the number of tokens and documents."""
    corpus = prepare_corpus(data_of(model.task.kind).source(data), model.tokenizers.source)
    message(f"{corpus.num_tokens:,} tokens in {count_noun(len(corpus), 'document')}")
    return corpus


def noise_of(model: EvaluatedModel) -> Noise:
    """Return the noise settings with which a model was trained.

    Hugging Face checkpoints do not store noise settings; for them, the noise of the papers is returned.

    Raises:
        InputError: the model was trained by clearhead, but its task record has no noise.
    """
    if model.task.noise is not None:
        return model.task.noise
    if model.hf_checkpoint is None:
        raise InputError("the task record of this model lacks the noise of its training; restore task.json")
    if model.module.spec.decoder is None:
        return Noise(kind="mask", share=0.15)
    if model.tokenizers.source.sentinel_ids:
        return Noise(kind="spans", share=0.15, mean_span=3.0)
    return Noise(kind="infill", share=0.3, mean_span=3.0)


def measure_hidden_tokens(
    model: EvaluatedModel, corpus: Corpus, objective: Objective, batch_size: int | None
) -> HiddenTokenMeasures:
    """Return metrics for the tokens that an objective hides in a text; the hidden tokens do not depend on batch size.

    Raises:
        InputError: the length of the training texts is unknown.
    """
    length = model.task.max_length or model.module.max_positions
    if length is None:
        raise InputError(
            "the task record of this model lacks max_length, the length of its training texts; restore task.json"
        )
    batches = window_epoch(corpus, objective, length=length)
    smaller = (batch for whole in batches for batch in whole.split_rows(batch_size))
    with torch.inference_mode():
        tokens = score_tokens(model.tree, smaller, device_of(model.module))
    assert tokens.score is not None, "tokens have a score"
    return HiddenTokenMeasures(tokens.loss, math.exp(min(tokens.loss, 700.0)), tokens.score / 100)
