"""Convert tokens to readable texts for pages, pictures and messages.

Data (Python results, JSON, arrays) has the vocabulary entries instead, which are exact.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from clearhead.generate.results import StreamingDecoder
from clearhead.text.token_bytes import part_of_character
from clearhead.text.tokenizer import Tokenizer

# Same signs as in labels.js of the page.
SIGNS = {" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "⍽", "\u202f": "⍽", "\u200b": "⌷", "\u3000": "□"}
OTHER_BLANKS = "".join(filter(str.isspace, map(chr, range(0x1680, 0x3000))))
"""All other Unicode spaces, such as the thin space."""
_SIGNED = str.maketrans(dict.fromkeys(OTHER_BLANKS, SIGNS[" "]) | SIGNS)
_UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class WrittenToken:
    """One token of a text, with its display text and bytes.

    Args:
        text: text of the token after another token, with its space. For a special token it is the vocabulary entry. For
            a token with part of a character it is also the entry, but the last part has the whole character.
        content: UTF-8 bytes that the token adds to the text; empty for a special token.
        offset: number of characters of the text before the token.
    """

    text: str
    content: bytes
    offset: int = 0


class TokenWriter:
    """Converts the tokens of one text one by one to display texts and bytes; the bytes add up to those of the text.

    Args:
        tokenizer: tokenizer of the tokens.
        context: token ids before the first token.
        end_ids: ids of end tokens, which add no text.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), end_ids: Sequence[int] = ()) -> None:
        self._tokenizer, self._text_of, self._end_ids = tokenizer, _writer(tokenizer), end_ids
        self._decoder = StreamingDecoder(tokenizer.decode, (), context)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._length, self._unfinished = 0, b""

    def add(self, index: int) -> WrittenToken:
        """Add the next token of the text, and return its display text and bytes."""
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
            # Bytes that form no character may come before the token.
            offset = self._length - len(content.decode("utf-8", "replace"))
        return WrittenToken(text or piece or alone.text, content, offset)

    def write_alone(self, index: int) -> WrittenToken:
        """Return the display text and bytes of a token without adding it, such as an alternative to the next token."""
        (entry,), text = self._tokenizer.tokens([index]), self._text_of(index)
        is_unfinished = not text and _UNFINISHED in self._tokenizer.decode([index])
        return WrittenToken(text or entry, part_of_character(entry) if is_unfinished else text.encode())


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the display text of each token; see `WrittenToken`.

    Args:
        tokenizer: tokenizer of the tokens.
        ids: token ids of one text.
    """
    writer = TokenWriter(tokenizer)
    return [writer.add(index).text for index in ids]


def label_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return display labels of tokens: their texts with visible signs for white space, such as ␣dog.

    Args:
        tokenizer: tokenizer of the tokens.
        ids: token ids of one text.
    """
    return [text.translate(_SIGNED) for text in token_texts(tokenizer, ids)]


def read_token(tokenizer: Tokenizer, written: str) -> int | None:
    """Return the first id with a display label (see `label_tokens`); None if no token has this label.

    Args:
        tokenizer: tokenizer of the token.
        written: display label of the token.
    """
    text_of = _writer(tokenizer)
    return next((index for index in range(tokenizer.vocab_size) if text_of(index).translate(_SIGNED) == written), None)


def _writer(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Return a function from an id to its text; the text is empty for special tokens and parts of characters."""

    @cache
    def text_of(index: int) -> str:
        alone, twice = tokenizer.decode([index]), tokenizer.decode([index, index])
        return "" if _UNFINISHED in twice or not twice.startswith(alone) else twice[len(alone) :]

    return text_of
