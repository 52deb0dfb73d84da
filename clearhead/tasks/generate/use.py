"""Predictions and metrics of language modelling: continuations, loss, perplexity and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clearhead.base.errors import InputError
from clearhead.data.objectives.prefix import PrefixSplit
from clearhead.data.stores.corpus import Corpus
from clearhead.generate.scoring.result import Measures, align_columns
from clearhead.tasks.evaluate.options import EvaluatedModel, EvaluateOptions
from clearhead.tasks.evaluate.text_loss import sequence_loss
from clearhead.tasks.use import corpus_of, finite_or_none, measure_hidden_tokens


@dataclass(frozen=True, repr=False, eq=False)
class TextMeasures(Measures):
    """Metrics of a language model on a text.

    Args:
        loss: the mean loss per token, in nats.
        perplexity: exp(loss); None if it is too large.
        bits_per_byte: the loss of the whole text in bits, divided by its bytes in UTF-8.
        tokens, bytes: the numbers of tokens and bytes of the text.
        seconds: the wall time of the evaluation.
    """

    loss: float
    perplexity: float | None
    bits_per_byte: float | None
    tokens: int
    bytes: int
    seconds: float

    def lines(self) -> list[str]:
        """Return the metrics as lines of text."""
        done = f"({self.tokens:,} in {self.seconds:.1f} s)"
        return align_columns(
            {
                "loss": f"{self.loss:.4f} nats per token",
                "perplexity": f"{math.inf if self.perplexity is None else self.perplexity:.3f}",
                "bits per byte": "none" if self.bits_per_byte is None else f"{self.bits_per_byte:.4f}",
                "speed": f"{self.tokens / max(self.seconds, 1e-9):,.0f} tokens per second {done}",
            }
        )


def predict(model: Any, texts: Sequence[str], *, batch_size: int | None = None) -> list[Any]:
    """Return the continuation of each text; see `Model.generate`."""
    return [sequences[0] for sequences in model.generate(list(texts), batch_size=batch_size)]


def measure(model: EvaluatedModel, data: object, options: EvaluateOptions) -> Measures:
    """Return the metrics of a model that predicts each next token of a text, or the rest of a text from its beginning.

    Raises:
        InputError: the data cannot be used, or an option has no effect on the model.
    """
    corpus, tokenizer = corpus_of(model, data), model.tokenizers.source
    if model.module.spec.encoder is None:
        return _next_tokens(model, corpus, options)
    for option in ("window", "stride"):
        if getattr(options, option) is not None:
            raise InputError(
                f"{option} has no effect here: this model predicts the rest of a text from its beginning, not each "
                "next token"
            )
    return measure_hidden_tokens(model, corpus, PrefixSplit(tokenizer), options.batch_size)


def _next_tokens(model: EvaluatedModel, corpus: Corpus, options: EvaluateOptions) -> TextMeasures:
    text_loss = sequence_loss(
        model.tree,
        [corpus.sequence(row, 0, int(length) + 2) for row, length in enumerate(corpus.documents.lengths)],
        pad_id=model.tokenizers.source.pad_id,
        num_bytes=corpus.text_bytes,
        window=options.window or model.task.max_length,
        stride=options.stride,
        batch_size=options.batch_size,
    )
    return TextMeasures(
        loss=text_loss.loss,
        perplexity=finite_or_none(text_loss.perplexity),
        bits_per_byte=text_loss.bits_per_byte,
        tokens=text_loss.num_tokens,
        bytes=corpus.text_bytes,
        seconds=text_loss.seconds,
    )
