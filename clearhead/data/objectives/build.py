"""Build the training objective, such as masked tokens, from the noise record (`Noise`) of a model."""

from __future__ import annotations

from clearhead.data.objectives.masking import MaskedLM
from clearhead.data.objectives.spans import SpanCorruption, TextInfilling
from clearhead.spec.tasks.record import Noise
from clearhead.text.tokenizer import Tokenizer


def build_objective(noise: Noise, tokenizer: Tokenizer) -> MaskedLM | SpanCorruption | TextInfilling:
    """Return the training objective, such as masked tokens, for the noise settings of a task record.

    Args:
        noise: the noise record: kind of noise, share of tokens, mean length of spans.
        tokenizer: a tokenizer with the special tokens of this kind of noise.

    Raises:
        InputError: the tokenizer lacks the special tokens, or a value is out of range.
    """
    if noise.kind == "mask":
        return MaskedLM(tokenizer, noise.share, noise.whole_words)
    assert noise.mean_span is not None, "the noise record needs mean_span for spans"
    return (SpanCorruption if noise.kind == "spans" else TextInfilling)(tokenizer, noise.share, noise.mean_span)
