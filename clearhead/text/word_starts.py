"""Which ids make up a word: read from the vocabulary entries alone, whatever marks the word starts in them.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import tokenizers
from jaxtyping import Bool, Int64, Integer
from numpy import ndarray

from clearhead.errors import InputError
from clearhead.text.tokenizer import Tokenizer

_MARKER = "▁"
_BYTE_SPACE = "Ġ"
_CONTINUING = "##"
_GLUED = "@@"
_BYTE_ENTRY = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NUM_BYTES = 256
# How each kind that is trained here writes its entries.
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
    """A table over the vocabulary of one tokenizer: where words begin, and what may stand in a text.

    A word is what white space separates. Two kinds of entries cut finer, for they say so themselves: those that mark
    continuing pieces ("##") begin a word wherever they do not, and a word-level vocabulary has one word in each entry.
    White space with an entry of its own is a word of its own.

    Args:
        tokenizer: the tokenizer whose entries are read.

    Attributes:
        texts: what each entry writes, its leading white space included; empty where the vocabulary has a hole.
        ordinary: True where an entry can come out of a text; False for special entries, "unknown" and holes.
        carries_space: whether words bring the white space before them, so that it has no tokens of its own.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        entries = _entries(tokenizer)
        style = dict(_STYLES).get(tokenizer.kind) or _guess(entries)
        special = special_ids(tokenizer)
        write = _writer(style, trained_here=tokenizer.kind != "pretrained")
        self.texts: tuple[str, ...] = tuple(write(entry) for entry in entries)
        self.ordinary = np.array([bool(entry) for entry in entries])
        self.ordinary[sorted(special)] = False
        self.carries_space = any(text[:1].isspace() and not text.isspace() for text in self.texts)
        self._starts_V = _starts(style, entries, self.texts)
        # Where a word brings its own space, a lone one is the beginning of a word that has no entry with its space.
        joins = (" ",) if self.carries_space else ()
        self._closes_V = np.array([text[-1:].isspace() and text not in joins for text in self.texts])
        self._glues_V = np.array([style == _SEGMENTED and entry.endswith(_GLUED) for entry in entries])
        borders = sorted(special - {tokenizer.unk_id} | {tokenizer.pad_id})
        self._starts_V[borders] = self._closes_V[borders] = True
        if tokenizer.roles.unk is not None:
            # Where an entry is a whole word, so is the unknown one; elsewhere it is a sign that may stand inside one.
            self._starts_V[tokenizer.unk_id] = style in (_PIECES, _WHOLE, _SEGMENTED)
        self._ends_sentence_V = np.array([text.rstrip().rstrip(_CLOSERS).endswith(_STOPS) for text in self.texts])
        self._newlines_V = np.array([_trailing_newlines(text) for text in self.texts])

    def begins(self, ids_T: Integer[ndarray, " tokens"]) -> Bool[ndarray, " tokens"]:
        """Return True where an id is the first of a word; the first id always is.

        Args:
            ids_T: ids of the vocabulary, special ones included; each of those stands alone.
        """
        begins_T: Bool[ndarray, " tokens"] = self._starts_V[ids_T]
        before_T = ids_T[:-1]
        begins_T[1:] = (begins_T[1:] & ~self._glues_V[before_T]) | self._closes_V[before_T]
        begins_T[:1] = True
        return begins_T

    def word_ids(self, ids_T: Integer[ndarray, " tokens"]) -> Int64[ndarray, " tokens"]:
        """Return the number of the word that each id belongs to, counted from 0.

        Args:
            ids_T: ids of the vocabulary, special ones included; each of those is a word of its own.
        """
        return np.cumsum(self.begins(ids_T), dtype=np.int64) - 1

    def ends_sentence(self, ids_T: Integer[ndarray, " tokens"]) -> Bool[ndarray, " tokens"]:
        """Return True where an id ends a sentence: at . ! ? before white space, at an empty line, and at the end.

        Args:
            ids_T: ids of the vocabulary, special ones included.
        """
        newlines_T = self._newlines_V[ids_T]
        ends_T: Bool[ndarray, " tokens"] = newlines_T >= 2
        ends_T[1:] |= (newlines_T[1:] > 0) & (newlines_T[:-1] > 0)
        ends_T[:-1] |= self._ends_sentence_V[ids_T[:-1]] & self.begins(ids_T)[1:]
        ends_T[-1:] = True
        return ends_T


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that have a role, "unknown" included, and every other entry that decoding leaves out.

    Args:
        tokenizer: the tokenizer whose vocabulary is looked through.
    """
    roles = tokenizer.roles
    named = {roles.pad, roles.bos, roles.eos, *tokenizer.sentinel_ids}
    named |= {index for index in (roles.unk, tokenizer.mask_id) if index is not None}
    if tokenizer.kind == "pretrained":
        # Only a special entry leaves no trace between two others; white space may vanish too, but is asked for first.
        for index, entry in enumerate(_entries(tokenizer)):
            if _unmarked(entry).strip(f"{_BYTE_SPACE} \n\t") and not tokenizer.decode([index]):
                named.add(index)
    return frozenset(named)


def word_ids(tokenizer: Tokenizer, ids: Integer[ndarray, " tokens"]) -> Int64[ndarray, " tokens"]:
    """Return the number of the word that each id belongs to; for many texts, keep a `Words` instead.

    Args:
        tokenizer: the tokenizer that made the ids.
        ids: ids of its vocabulary, special ones included; each of those is a word of its own.
    """
    return WordBoundaries(tokenizer).word_ids(ids)


def _entries(tokenizer: Tokenizer) -> list[str]:
    entries = []
    for index in range(tokenizer.vocab_size):
        try:
            entries += tokenizer.tokens([index])
        except InputError:  # a published vocabulary can have holes
            entries.append("")
    return entries


def _guess(entries: Sequence[str]) -> str:
    """Find out how a published vocabulary marks words, by the mark that most of its entries carry."""
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
    """Return the function from an entry to the text that it writes."""
    if style == _BYTES:
        table = _byte_table()
        return lambda entry: bytes(table.get(sign, ord("?")) for sign in entry).decode("utf-8", errors="replace")
    if style == _PLAIN:
        return str
    if style == _SEGMENTED or (style in (_PIECES, _WHOLE) and not trained_here):
        return lambda entry: entry[len(_CONTINUING) :] if _continues(style, entry) else f" {entry}" if entry else ""
    return lambda entry: _unmarked(entry[len(_CONTINUING) :] if _continues(style, entry) else entry)


def _continues(style: str, entry: str) -> bool:
    return style == _PIECES and len(entry) > len(_CONTINUING) and entry.startswith(_CONTINUING)


def _unmarked(entry: str) -> str:
    found = _BYTE_ENTRY.fullmatch(entry)
    if found is not None:
        return bytes([int(found[1], 16)]).decode("utf-8", errors="replace")
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
    """Return the byte that each sign of a byte-level entry stands for."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    table = {sign: ord(sign) for sign in alphabet if ord(sign) < _NUM_BYTES}
    unprinted = (byte for byte in range(_NUM_BYTES) if chr(byte) not in table)
    return table | {sign: next(unprinted) for sign in alphabet if ord(sign) >= _NUM_BYTES}
