"""How a token is written where people read it: on pages, in pictures and in messages.

Data (what Python returns, JSON, arrays) has the entry of the vocabulary instead, which is exact.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from clearhead.generate.results import StreamingDecoder
from clearhead.text.token_bytes import part_of_character
from clearhead.text.tokenizer import Tokenizer

# As in the page's labels.js.
SIGNS = {" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "⍽", "\u202f": "⍽", "\u200b": "⌷", "\u3000": "□"}
OTHER_BLANKS = "".join(filter(str.isspace, map(chr, range(0x1680, 0x3000))))
"""The other blanks of Unicode, such as a thin one."""
_SIGNED = str.maketrans(dict.fromkeys(OTHER_BLANKS, SIGNS[" "]) | SIGNS)
_UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class WrittenToken:
    """One token of a text.

    Args:
        text: the token as it is after another one, with its space. A special token is its vocabulary entry, and so is
            a part of a character except the last, which has the whole character.
        content: the UTF-8 bytes that it adds to the text; none for a special token.
        offset: characters of the text before the token.
    """

    text: str
    content: bytes
    offset: int = 0


class TokenWriter:
    """Writes the tokens of one text, one after the other; their bytes together are those of the text.

    Args:
        tokenizer: of the tokens.
        context: ids before the first token.
        end_ids: tokens that write nothing.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), end_ids: Sequence[int] = ()) -> None:
        self._tokenizer, self._text_of, self._end_ids = tokenizer, _writer(tokenizer), end_ids
        self._decoder = StreamingDecoder(tokenizer.decode, (), context)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._length, self._unfinished = 0, b""

    def add(self, index: int) -> WrittenToken:
        """Return the next token of the text."""
        if index in self._end_ids:
            return WrittenToken(self._tokenizer.tokens([index])[0], b"", self._length)
        alone, piece, offset = self.write_alone(index), self._decoder.add(index), self._length
        content, whole = alone.content, piece.encode("utf-8", "replace")
        if piece and whole.startswith(self._unfinished):
            content = whole[len(self._unfinished) :]
        self._unfinished = b"" if piece else self._unfinished + content
        self._length += len(self._utf8.decode(content))
        text = self._text_of(index)
        if text:
            # Bytes that are no character may come before it.
            offset = self._length - len(content.decode("utf-8", "replace"))
        return WrittenToken(text or piece or alone.text, content, offset)

    def write_alone(self, index: int) -> WrittenToken:
        """Return a token that may follow, such as an alternative to the one that does."""
        (entry,), text = self._tokenizer.tokens([index]), self._text_of(index)
        is_unfinished = not text and _UNFINISHED in self._tokenizer.decode([index])
        return WrittenToken(text or entry, part_of_character(entry) if is_unfinished else text.encode())


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token: see `WrittenToken`.

    Args:
        tokenizer: of the tokens.
        ids: tokens of one text.
    """
    writer = TokenWriter(tokenizer)
    return [writer.add(index).text for index in ids]


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
