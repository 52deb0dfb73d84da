"""How a token is written where people read it: on pages, in pictures and in messages.

Data (what Python returns, JSON, arrays) has the entry of the vocabulary instead, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from clearhead.generate.streaming_decoder import StreamingDecoder
from clearhead.text.tokenizer import Tokenizer

# As in the page's labels.js.
SIGNS = {" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "⍽", "\u202f": "⍽", "\u200b": "⌷", "\u3000": "□"}
OTHER_BLANKS = "".join(filter(str.isspace, map(chr, range(0x1680, 0x3000))))
"""The other blanks of Unicode, such as a thin one."""
_SIGNED = str.maketrans(dict.fromkeys(OTHER_BLANKS, SIGNS[" "]) | SIGNS)
_UNFINISHED = "\ufffd"


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token as it is behind another one, with its space.

    A special token is its entry of the vocabulary, and so is a part of a character but the last, which has it whole.

    Args:
        tokenizer: of the tokens.
        ids: tokens of one text.
    """
    text_of, decoder = _writer(tokenizer), StreamingDecoder(tokenizer.decode)
    pieces = [decoder.add(index) for index in ids]
    return [
        text or piece or entry
        for text, piece, entry in zip(map(text_of, ids), pieces, tokenizer.tokens(ids), strict=True)
    ]


def label_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the labels of tokens on pages and in pictures: their texts with signs for blanks, such as ␣dog.

    Args:
        tokenizer: of the tokens.
        ids: tokens of one text.
    """
    return [text.translate(_SIGNED) for text in token_texts(tokenizer, ids)]


def read_token(tokenizer: Tokenizer, written: str) -> int | None:
    """Return the first id whose token is written so by `label_tokens`; None: there is none.

    Args:
        tokenizer: of the token.
        written: the token.
    """
    text_of = _writer(tokenizer)
    return next((index for index in range(tokenizer.vocab_size) if text_of(index).translate(_SIGNED) == written), None)


def _writer(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Return the function from an id to its text, which is empty for a special token and for a part of a character."""

    @cache
    def text_of(index: int) -> str:
        alone, twice = tokenizer.decode([index]), tokenizer.decode([index, index])
        return "" if _UNFINISHED in twice or not twice.startswith(alone) else twice[len(alone) :]

    return text_of
