"""Language-model metrics of a text: loss, perplexity and bits per byte."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from clearhead.base.errors import InputError
from clearhead.core import Transformer
from clearhead.generate.scoring.texts import TokenIds, score_targets, token_log_probabilities, with_special_tokens
from clearhead.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextLoss:
    """Loss of a model on a text.

    Args:
        nats: the summed cross-entropy of all scored tokens, in nats, without label smoothing.
        num_tokens: the number of scored tokens, end tokens included.
        num_bytes: the number of bytes of the text in UTF-8; None if unknown.
        seconds: the wall time of the pass.
    """

    nats: float
    num_tokens: int
    num_bytes: int | None
    seconds: float

    @property
    def loss(self) -> float:
        """The mean cross-entropy per token, in nats."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss) if self.loss < math.log(1e300) else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits per byte of text, comparable between vocabularies; None if the bytes are unknown."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else None


def sequence_loss(
    module: Transformer,
    sequences: Sequence[TokenIds],
    *,
    pad_id: int,
    num_bytes: int | None = None,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int | None = None,
) -> TextLoss:
    """Return the total loss of token sequences under a language model, without storing values per token.

    Args:
        module, sequences, pad_id, window, stride, batch_size: the arguments of `score_sequences`; sequences may be
            memory-mapped.
        num_bytes: the number of bytes of the text in UTF-8, for the bits per byte.

    Raises:
        InputError: there are no sequences, or `score_sequences` refuses them.
    """
    if not len(sequences):
        raise InputError("there is nothing to score: give at least one text")
    started = time.perf_counter()
    nats, num_tokens = 0.0, 0
    for _, log_probs in token_log_probabilities(module, sequences, pad_id, window, stride, batch_size=batch_size):
        nats -= float(log_probs.sum())
        num_tokens += len(log_probs)
    return TextLoss(nats, num_tokens, num_bytes, time.perf_counter() - started)


def text_loss(
    module: Transformer,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    window: int | None = None,
    stride: int | None = None,
) -> TextLoss:
    """Return the loss of texts, each read as a separate document with an end token.

    Args:
        module, tokenizer, texts, window, stride: the arguments of `score_texts`.

    Raises:
        InputError: there are no texts, or `score_texts` refuses them.
    """
    return sequence_loss(
        module,
        with_special_tokens(tokenizer, texts),
        pad_id=tokenizer.pad_id,
        num_bytes=sum(len(text.encode()) for text in texts),
        window=window,
        stride=stride,
    )


def target_loss(
    module: Transformer,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    pad_id: int,
    batch_size: int | None = None,
) -> TextLoss:
    """Return the loss of target texts, conditioned on their sources.

    Args:
        module: an encoder-decoder model; it runs in evaluation mode, and its mode is restored.
        sources: the ids that the encoder reads, none empty.
        targets: the ids of the targets, with start and end token.
        pad_id: the padding id.
        batch_size: the maximum number of pairs in a batch; None means that only a token budget limits it.

    Raises:
        InputError: there are no pairs, counts differ, a source is empty, or a sequence exceeds the model's positions.
    """
    if not targets:
        raise InputError("there is nothing to evaluate: give at least one sentence pair")
    started = time.perf_counter()
    scores = score_targets(module, sources, targets, pad_id=pad_id, length_penalty=0.0, batch_size=batch_size)
    nats = -math.fsum(score.log_probability for score in scores)
    return TextLoss(nats, sum(len(score.ids) for score in scores), None, time.perf_counter() - started)
