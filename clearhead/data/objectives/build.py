"""Builds the objective of a noise record, which is saved with a model."""

from __future__ import annotations

from clearhead.data.objectives.masking import MaskedLM
from clearhead.data.objectives.spans import SpanCorruption, TextInfilling
from clearhead.spec.tasks.record import Noise
from clearhead.text.tokenizer import Tokenizer


def build_objective(noise: Noise, tokenizer: Tokenizer) -> MaskedLM | SpanCorruption | TextInfilling:
    """Return the objective of a noise record.

    Args:
        noise: kind, share and length of spans.
        tokenizer: has the special tokens of its kind.

    Raises:
        InputError: the tokenizer lacks them, or a value is out of range.
    """
    if noise.kind == "mask":
        return MaskedLM(tokenizer, noise.share, noise.whole_words)
    assert noise.mean_span is not None, "spans have a mean length"
    return (SpanCorruption if noise.kind == "spans" else TextInfilling)(tokenizer, noise.share, noise.mean_span)
