"""Word boundaries between token ids, derived from the vocabulary entries, for every style of marking words.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np
import tokenizers
from jaxtyping import Bool, Int64, Integer
from numpy import ndarray

from clearhead.text.tokenizer import Tokenizer

_MARKER = "▁"
_BYTE_SPACE = "Ġ"
_CONTINUING = "##"
_GLUED = "@@"
_BYTE_ENTRY = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NUM_BYTES = 256
# Style in which each kind of tokenizer marks words in its entries.
_BYTES, _MARKED, _PIECES, _WHOLE, _PLAIN, _SEGMENTED = "bytes", "marked", "pieces", "whole", "plain", "segmented"
_STYLES = (
    ("byte-bpe", _BYTES),
    ("byte", _BYTES),
    ("bpe", _MARKED),
    ("unigram", _MARKED),
    ("wordpiece", _PIECES),
    ("word", _WHOLE),
    ("character", _PLAIN),
    ("split", _SEGMENTED),
)
_CLOSERS = "\"'”’»)]}"
_STOPS = (".", "!", "?", "…", "。", "！", "？")


class WordBoundaries:
    """Table over the vocabulary of a tokenizer: entries that begin a word, and entries that can occur in a text.

    Words are separated by white space. Two kinds of vocabularies have more boundaries. If continuations are marked
    ("##"), every unmarked entry begins a word. In a word-level vocabulary, each entry is a word. An entry of only white
    space is a separate word.

    Args:
        tokenizer: tokenizer with the vocabulary.

    Attributes:
        texts: text of each entry with its leading white space; empty for unused ids.
        ordinary: True for entries that a text can be encoded as; False for special tokens, "unknown" and unused ids.
        carries_space: True if words include the white space before them, so that spaces have no separate tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        entries = tokenizer.entries()
        style = dict(_STYLES).get(tokenizer.kind) or _guess_style(entries)
        special = special_ids(tokenizer)
        write = _writer(style, trained_here=tokenizer.kind != "pretrained")
        self.texts: tuple[str, ...] = tuple(map(write, entries))
        self.ordinary: Bool[ndarray, "entries"] = np.array(list(map(bool, entries)))
        self.ordinary[sorted(special)] = False
        self.carries_space: bool = any(text[:1].isspace() and not text.isspace() for text in self.texts)
        self._starts_V = _starts(style, entries, self.texts)
        # If words include their space, a separate space token begins a word that has no entry with a space.
        joins = (" ",) if self.carries_space else ()
        self._closes_V = np.array([text[-1:].isspace() and text not in joins for text in self.texts])
        self._glues_V = np.array([style == _SEGMENTED and entry.endswith(_GLUED) for entry in entries])
        borders = sorted(special - {tokenizer.unk_id} | {tokenizer.pad_id})
        self._starts_V[borders] = self._closes_V[borders] = True
        if tokenizer.roles.unk is not None:
            # If every entry is a word, so is the unknown token; otherwise it can be inside a word.
            self._starts_V[tokenizer.unk_id] = style in (_PIECES, _WHOLE, _SEGMENTED)
        self._ends_sentence_V = np.array([text.rstrip().rstrip(_CLOSERS).endswith(_STOPS) for text in self.texts])
        self._newlines_V = np.array(list(map(_trailing_newlines, self.texts)))

    def begins(self, ids_T: Integer[ndarray, " tokens"]) -> Bool[ndarray, " tokens"]:
        """Return a mask with True at the first id of each word; the first id of all is always True.

        Args:
            ids_T: token ids; each special token is a separate word.
        """
        begins_T: Bool[ndarray, " tokens"] = self._starts_V[ids_T]
        before_T = ids_T[:-1]
        begins_T[1:] = (begins_T[1:] & ~self._glues_V[before_T]) | self._closes_V[before_T]
        begins_T[:1] = True
        return begins_T

    def word_ids(self, ids_T: Integer[ndarray, " tokens"]) -> Int64[ndarray, " tokens"]:
        """Return the word number of each id, from 0.

        Args:
            ids_T: token ids; each special token is a separate word.
        """
        return np.cumsum(self.begins(ids_T), dtype=np.int64) - 1

    def ends_sentence(self, ids_T: Integer[ndarray, " tokens"]) -> Bool[ndarray, " tokens"]:
        """Return a mask with True at the end of each sentence: at . ! ? before white space, empty lines, and the end.

        Args:
            ids_T: token ids, special tokens included.
        """
        newlines_T = self._newlines_V[ids_T]
        ends_T: Bool[ndarray, " tokens"] = newlines_T >= 2
        ends_T[1:] |= (newlines_T[1:] > 0) & (newlines_T[:-1] > 0)
        ends_T[:-1] |= self._ends_sentence_V[ids_T[:-1]] & self.begins(ids_T)[1:]
        ends_T[-1:] = True
        return ends_T


@lru_cache(maxsize=4)
def word_boundaries(tokenizer: Tokenizer) -> WordBoundaries:
    """Return the word boundaries of a tokenizer; cached, since building the table decodes the whole vocabulary."""
    return WordBoundaries(tokenizer)


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of tokens with a role, such as padding and unknown, and all other ids that decoding skips.

    Args:
        tokenizer: tokenizer with the vocabulary.
    """
    roles = tokenizer.roles
    named = {roles.pad, roles.bos, roles.eos, *tokenizer.sentinel_ids}
    named |= {index for index in (roles.unk, tokenizer.mask_id) if index is not None}
    if tokenizer.kind == "pretrained":
        # Decoding skips special tokens; it may also skip white space, which is no special token.
        for index, entry in enumerate(tokenizer.entries()):
            if _entry_text(entry).strip(f"{_BYTE_SPACE} \n\t") and not tokenizer.decode([index]):
                named.add(index)
    return frozenset(named)


def _guess_style(entries: Sequence[str]) -> str:
    """Guess the style in which the vocabulary of a checkpoint marks words, from the most frequent mark."""
    counts = {
        style: sum(len(entry) > len(mark) and getattr(entry, where)(mark) for entry in entries)
        for style, where, mark in (
            (_BYTES, "startswith", _BYTE_SPACE),
            (_MARKED, "startswith", _MARKER),
            (_PIECES, "startswith", _CONTINUING),
            (_SEGMENTED, "endswith", _GLUED),
        )
    }
    if set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) <= set(entries):
        return _BYTES
    style = max(counts, key=lambda name: counts[name])
    if counts[style]:
        return style
    return _PLAIN if any(entry.isspace() for entry in entries) else _WHOLE


def _writer(style: str, *, trained_here: bool) -> Callable[[str], str]:
    """Return a function from a vocabulary entry to its text, with the leading white space."""
    if style == _BYTES:
        return partial(_decode_entry, _byte_table())
    if style == _PLAIN:
        return str
    if style == _SEGMENTED or (style in (_PIECES, _WHOLE) and not trained_here):
        return partial(_add_space, style)
    return partial(_replace_marker, style)


def _decode_entry(table: Mapping[str, int], entry: str) -> str:
    """Return the text of a byte-level vocabulary entry."""
    return bytes(table.get(sign, ord("?")) for sign in entry).decode("utf-8", errors="replace")


def _add_space(style: str, entry: str) -> str:
    """Return the text of an entry, with a space before it unless the entry continues a word."""
    if _continues(style, entry):
        return entry[len(_CONTINUING) :]
    return f" {entry}" if entry else ""


def _replace_marker(style: str, entry: str) -> str:
    """Return the text of an entry, with a space only where it has a word marker."""
    return _entry_text(entry[len(_CONTINUING) :] if _continues(style, entry) else entry)


def _continues(style: str, entry: str) -> bool:
    return style == _PIECES and len(entry) > len(_CONTINUING) and entry.startswith(_CONTINUING)


def _entry_text(entry: str) -> str:
    match = _BYTE_ENTRY.fullmatch(entry)
    if match is not None:
        return bytes([int(match[1], 16)]).decode("utf-8", errors="replace")
    return entry.replace(_MARKER, " ")


def _starts(style: str, entries: Sequence[str], texts: Sequence[str]) -> Bool[ndarray, " vocabulary"]:
    if style in (_WHOLE, _SEGMENTED):
        return np.ones(len(entries), dtype=np.bool_)
    if style == _PIECES:
        return np.array([not _continues(style, entry) for entry in entries])
    return np.array([bool(text) and text[0].isspace() for text in texts])


def _trailing_newlines(text: str) -> int:
    return text[len(text.rstrip()) :].count("\n")


def _byte_table() -> dict[str, int]:
    """Return a dictionary from each character of byte-level entries to its byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    table = {sign: ord(sign) for sign in alphabet if ord(sign) < _NUM_BYTES}
    unprinted = (byte for byte in range(_NUM_BYTES) if chr(byte) not in table)
    return table | {sign: next(unprinted) for sign in alphabet if ord(sign) >= _NUM_BYTES}
