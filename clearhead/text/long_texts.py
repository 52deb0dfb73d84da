"""Texts that are longer than a model reads: truncated, at the cost of what is read, and said once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from clearhead.base.errors import ContextTooLong, InputError, LongTexts, nth_text
from clearhead.text.tokenizer import Tokenizer

# Tokens are a few characters long; what is behind so many is truncated before the text is tokenized.
CHARACTERS_PER_TOKEN = 64

MOST_CHARACTERS = 1_000_000
"""The longest text that is read whole, or in chunks."""
LONGEST_PROMPT = 2**17
"""Tokens that are read at once by a model whose positions have no limit."""


def warn_of_long_texts(count: int, limit: int, unit: str = "tokens") -> None:
    """Warn of texts that were truncated, if there are any."""
    if count:
        warnings.warn(LongTexts(count, limit, unit), stacklevel=2)


def refuse_enormous(texts: Sequence[str], most: int | None, what: str = "text") -> None:
    """Refuse texts that are far longer than a model reads, before they are tokenized.

    Args:
        texts: each is to be read whole.
        most: the ids that the model reads; None: there is no limit.
        what: they are, for the message.

    Raises:
        InputError: a text has too many characters; of several it is named by its number, counted from 1.
    """
    limit = MOST_CHARACTERS if most is None else min(MOST_CHARACTERS, most * CHARACTERS_PER_TOKEN)
    for number, text in enumerate(texts, start=1):
        if len(text) > limit:
            name = f"the {what}" if len(texts) == 1 else nth_text(number, what)
            kind = InputError if most is None else ContextTooLong
            most_read = f"{limit:,} are read at once" + ("" if most is None else f", for {most:,} tokens")
            raise kind(name + f" has {len(text):,} characters, but at most {most_read}: split or shorten it")


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
