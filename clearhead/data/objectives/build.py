"""From the description of a noise, which is kept with a model, to the objective that makes it."""

from __future__ import annotations

from clearhead.data.objectives.infilling import Infill
from clearhead.data.objectives.masking import Masked
from clearhead.data.objectives.spans import Spans
from clearhead.task import Noise
from clearhead.text.tokenizer import Tokenizer


def build_noise(noise: Noise, tokenizer: Tokenizer) -> Masked | Spans | Infill:
    """Return the objective that a description means.

    Args:
        noise: kind, share and length of spans.
        tokenizer: has the special tokens of its kind.

    Raises:
        InputError: the tokenizer lacks them, or a value is out of range.
    """
    if noise.kind == "mask":
        return Masked(tokenizer, noise.share, noise.whole_words)
    assert noise.mean_span is not None, "spans have a mean length"
    return (Spans if noise.kind == "spans" else Infill)(tokenizer, noise.share, noise.mean_span)
