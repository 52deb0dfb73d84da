"""Texts that are longer than a model can read: truncate them before tokenizing, refuse them, or warn."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from clearhead.base.errors import ContextTooLong, InputError, LongTexts, nth_text
from clearhead.text.tokenizer import Tokenizer

# A text is cut to this many characters per token before it is tokenized; tokens are a few characters long.
CHARACTERS_PER_TOKEN = 64

MOST_CHARACTERS = 1_000_000
"""Most characters of a text that is read whole or in chunks."""
LONGEST_PROMPT = 2**17
"""Most tokens that a model without a limit of positions reads at once."""


def warn_of_long_texts(count: int, limit: int, unit: str = "tokens") -> None:
    """Warn if `count` texts were truncated to `limit` tokens (or other units)."""
    if count:
        warnings.warn(LongTexts(count, limit, unit), stacklevel=2)


def refuse_enormous(texts: Sequence[str], most: int | None, what: str = "text") -> None:
    """Refuse texts that are far longer than a model can read, before they are tokenized.

    Args:
        texts: texts that must be read whole.
        most: maximum number of tokens that the model reads. None means no limit.
        what: noun for a text in the message.

    Raises:
        InputError: a text has too many characters; among several texts, the message has its number, from 1.
    """
    limit = MOST_CHARACTERS if most is None else min(MOST_CHARACTERS, most * CHARACTERS_PER_TOKEN)
    for number, text in enumerate(texts, start=1):
        if len(text) > limit:
            name = f"the {what}" if len(texts) == 1 else nth_text(number, what)
            kind = InputError if most is None else ContextTooLong
            most_read = f"{limit:,} are read at once" + ("" if most is None else f", for {most:,} tokens")
            raise kind(name + f" has {len(text):,} characters, but at most {most_read}: split or shorten it")


def encode_start(tokenizer: Tokenizer, texts: Sequence[str], most: int) -> tuple[list[list[int]], list[bool]]:
    """Return, for each text, at most its first `most` ids, and a flag that is True if the text has more.

    Only the start of a text is tokenized, so time and memory do not grow with its full length.

    Args:
        tokenizer: tokenizer of the texts.
        texts: texts to encode.
        most: maximum number of ids per text, at least 1.

    Raises:
        InputError: same as `Tokenizer.encode_batch`.
    """
    starts = [text[: most * CHARACTERS_PER_TOKEN] for text in texts]
    encoded = tokenizer.encode_batch(starts)
    is_cut = [
        len(ids) > most or len(start) < len(text) for ids, start, text in zip(encoded, starts, texts, strict=True)
    ]
    return [ids[:most] for ids in encoded], is_cut
