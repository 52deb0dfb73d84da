"""Texts that are longer than a model reads: truncated, at the cost of what is read, and said once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from clearhead.errors import LongTexts
from clearhead.text.tokenizer import Tokenizer

# Tokens are a few characters long; what is behind so many is truncated before the text is tokenized.
CHARACTERS_PER_TOKEN = 64

MOST_CHARACTERS = 1_000_000
"""The longest text that is read in chunks."""


def warn_of_long_texts(count: int, limit: int, unit: str = "tokens") -> None:
    """Warn of texts that were truncated, if there are any."""
    if count:
        warnings.warn(LongTexts(count, limit, unit), stacklevel=2)


def encode_start(tokenizer: Tokenizer, texts: Sequence[str], most: int) -> tuple[list[list[int]], list[bool]]:
    """Return at most so many ids of each text, and for each whether it has more.

    A text takes no more time and memory than what is read of it.

    Args:
        tokenizer: of the texts.
        texts: the texts.
        most: ids of a text, at least 1.

    Raises:
        InputError: as for `Tokenizer.encode_batch`.
    """
    starts = [text[: most * CHARACTERS_PER_TOKEN] for text in texts]
    encoded = tokenizer.encode_batch(starts)
    is_cut = [
        len(ids) > most or len(start) < len(text) for ids, start, text in zip(encoded, starts, texts, strict=True)
    ]
    return [ids[:most] for ids in encoded], is_cut
