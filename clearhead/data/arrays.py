"""Ragged arrays: rows of token ids with different lengths in one flat array."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64, Integer
from numpy import ndarray

from clearhead.text.tokenizer import Tokenizer

Ids = Integer[ndarray, " tokens"]
Rows = Int64[ndarray, " rows"]
Indices = Int64[ndarray, " _"]

_CHUNK_TEXTS = 20_000


@dataclass(frozen=True)
class Ragged:
    """A ragged array: rows of ids with different lengths, one after the other.

    Args:
        ids: the ids of all rows, in row order.
        offsets: the index in `ids` at which each row starts; the last entry is the end of the last row.
    """

    ids: Ids
    offsets: Int64[ndarray, " boundaries"]

    @classmethod
    def of(cls, ids: Ids, lengths: Rows) -> Ragged:
        """Return the ragged array of concatenated ids whose rows have the given lengths."""
        return cls(ids, np.concatenate([[0], np.cumsum(lengths)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Rows:
        """The number of ids of each row."""
        return np.diff(self.offsets)

    @cached_property
    def longest(self) -> int:
        """The length of the longest row."""
        return int(self.lengths.max())

    @property
    def row_numbers(self) -> Int64[ndarray, " tokens"]:
        """The row number of each id, counted from 0."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def positions(self) -> Int64[ndarray, " tokens"]:
        """The position of each id in its row, counted from 0."""
        return positions(self.lengths)

    def __getitem__(self, index: int | np.int64) -> Ids:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def take(self, rows: Indices) -> Ragged:
        """Return the rows with the given numbers, in the given order."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        return Ragged.of(self.ids[positions(lengths) + np.repeat(starts, lengths)], lengths)

    def keep(self, mask: Bool[ndarray, " tokens"]) -> Ragged:
        """Return all rows with only the ids at which `mask` is True."""
        counts = np.bincount(self.row_numbers[mask], minlength=len(self))
        return Ragged.of(self.ids[mask], counts.astype(np.int64))

    def truncate(self, lengths: Rows, keep: Bool[ndarray, " rows"]) -> Ragged:
        """Return some of the rows, each truncated at its end.

        Args:
            lengths: the number of ids that remain of each row.
            keep: True for each row to keep.
        """
        lengths = np.where(keep, lengths, 0)
        counts = np.stack([lengths, self.lengths - lengths], axis=1).ravel()
        return Ragged.of(self.ids[np.repeat(np.tile([True, False], len(lengths)), counts)], lengths[keep])


def positions(lengths: Rows) -> Int64[ndarray, " items"]:
    """Return the position of each item within its row, counted from 0, for concatenated rows of given lengths."""
    counted: Int64[ndarray, " items"] = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return counted


def id_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return the narrowest dtype that holds the ids of a tokenizer."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<i4")


def pack(rows: Sequence[Sequence[int]], dtype: np.dtype[Any]) -> Ragged:
    """Concatenate lists of ids into a ragged array."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    flat = itertools.chain.from_iterable(rows)
    return Ragged.of(np.fromiter(flat, dtype=dtype, count=int(lengths.sum())), lengths)


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer) -> Ragged:
    """Tokenize texts into a ragged array, without special ids."""
    chunks = [
        pack(tokenizer.encode_batch(texts[start : start + _CHUNK_TEXTS]), id_dtype(tokenizer))
        for start in range(0, len(texts), _CHUNK_TEXTS)
    ]
    return Ragged.of(
        np.concatenate([chunk.ids for chunk in chunks]), np.concatenate([chunk.lengths for chunk in chunks])
    )


def fitting_lengths(lengths: Sequence[Rows], room: int) -> list[Rows]:
    """Return the number of ids of each text that fit into a limit; in a pair, the longer text is truncated first.

    Args:
        lengths: the number of ids of each text; for pairs one array for the first texts and one for the second texts.
        room: the maximum number of ids of a text, or of both texts of a pair together.
    """
    first_N, *seconds = lengths
    if not seconds:
        return [np.minimum(first_N, room)]
    share = (room + 1) // 2
    kept_N = np.minimum(first_N, np.maximum(share, room - seconds[0]))
    return [kept_N, np.minimum(seconds[0], room - kept_N)]
