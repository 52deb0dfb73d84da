"""How well a model predicts text: loss, perplexity and bits per byte."""

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
    """How well a model predicts text.

    Args:
        nats: sum of the cross-entropies of all scored tokens, without label smoothing.
        num_tokens: scored tokens, end tokens included.
        num_bytes: bytes of the text in UTF-8; None if unknown.
        seconds: wall time of the pass.
    """

    nats: float
    num_tokens: int
    num_bytes: int | None
    seconds: float

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss) if self.loss < math.log(1e300) else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, comparable between vocabularies; None if the number of bytes is unknown."""
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
    """Return the loss of all sequences together; nothing is kept for each token.

    Args:
        module, sequences, pad_id, window, stride, batch_size: as for `score_sequences`; sequences may be memory-mapped.
        num_bytes: bytes of the text in UTF-8, for the bits per byte.

    Raises:
        InputError: as for `score_sequences`; or no sequences.
    """
    if not len(sequences):
        raise InputError("there is nothing to score: give at least one text.")
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
    """Return the loss of texts, each a document of its own with an end token.

    Args:
        module, tokenizer, texts, window, stride: as for `score_texts`.

    Raises:
        InputError: as for `score_texts`; or no texts.
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
    """Return the loss of targets, given their sources.

    Args:
        module: an encoder-decoder model; run in evaluation mode, its own mode is restored.
        sources: ids as the encoder reads them, none empty.
        targets: ids with start and end token.
        pad_id: padding id.
        batch_size: most pairs of one batch; None: no limit but the tokens.

    Raises:
        InputError: no pairs, unequal counts, an empty source, or a sequence longer than the model's positions.
    """
    if not targets:
        raise InputError("there is nothing to evaluate: give at least one sentence pair.")
    started = time.perf_counter()
    scores = score_targets(module, sources, targets, pad_id=pad_id, length_penalty=0.0, batch_size=batch_size)
    nats = -math.fsum(score.log_probability for score in scores)
    return TextLoss(nats, sum(len(score.ids) for score in scores), None, time.perf_counter() - started)
