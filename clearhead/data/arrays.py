"""Rows of ids of different lengths in one array, and texts as such rows."""

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
    """Rows of ids of different lengths, one behind the other.

    Args:
        ids: the ids of all rows.
        offsets: where each row starts; the last number is where the last row ends.
    """

    ids: Ids
    offsets: Int64[ndarray, " boundaries"]

    @classmethod
    def of(cls, ids: Ids, lengths: Rows) -> Ragged:
        """Return rows of some lengths."""
        return cls(ids, np.concatenate([[0], np.cumsum(lengths)]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Rows:
        """The number of ids of each row."""
        return np.diff(self.offsets)

    @cached_property
    def longest(self) -> int:
        """The most ids of a row."""
        return int(self.lengths.max())

    @property
    def row_numbers(self) -> Int64[ndarray, " tokens"]:
        """The row of each id."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def positions(self) -> Int64[ndarray, " tokens"]:
        """The position of each id in its row, counted from 0."""
        return positions(self.lengths)

    def __getitem__(self, index: int | np.int64) -> Ids:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def take(self, rows: Indices) -> Ragged:
        """Return some rows, in the order of their numbers."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        return Ragged.of(self.ids[positions(lengths) + np.repeat(starts, lengths)], lengths)

    def keep(self, mask: Bool[ndarray, " tokens"]) -> Ragged:
        """Return all rows without the ids that are not kept."""
        counts = np.bincount(self.row_numbers[mask], minlength=len(self))
        return Ragged.of(self.ids[mask], counts.astype(np.int64))

    def truncate(self, lengths: Rows, keep: Bool[ndarray, " rows"]) -> Ragged:
        """Return the rows to keep, each with its first ids only.

        Args:
            lengths: how many ids of each row remain.
            keep: True for each row to keep.
        """
        lengths = np.where(keep, lengths, 0)
        counts = np.stack([lengths, self.lengths - lengths], axis=1).ravel()
        return Ragged.of(self.ids[np.repeat(np.tile([True, False], len(lengths)), counts)], lengths[keep])


def positions(lengths: Rows) -> Int64[ndarray, " items"]:
    """Number the items of each row from 0, for rows behind each other."""
    counted: Int64[ndarray, " items"] = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return counted


def id_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return the narrowest dtype that holds the ids of a tokenizer."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<i4")


def pack(rows: Sequence[Sequence[int]], dtype: np.dtype[Any]) -> Ragged:
    """Put lists of ids behind each other."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    flat = itertools.chain.from_iterable(rows)
    return Ragged.of(np.fromiter(flat, dtype=dtype, count=int(lengths.sum())), lengths)


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer) -> Ragged:
    """Return the ids of each text, without special ids."""
    chunks = [
        pack(tokenizer.encode_batch(texts[start : start + _CHUNK_TEXTS]), id_dtype(tokenizer))
        for start in range(0, len(texts), _CHUNK_TEXTS)
    ]
    return Ragged.of(
        np.concatenate([chunk.ids for chunk in chunks]), np.concatenate([chunk.lengths for chunk in chunks])
    )


def fitting_lengths(lengths: Sequence[Rows], room: int) -> list[Rows]:
    """Return how many ids of each text fit into some room; of a pair the longer text is truncated first.

    Args:
        lengths: ids of the texts, or of the first and of the second texts of pairs.
        room: ids of a text, or of both together, that fit.
    """
    first_N, *seconds = lengths
    if not seconds:
        return [np.minimum(first_N, room)]
    share = (room + 1) // 2
    kept_N = np.minimum(first_N, np.maximum(share, room - seconds[0]))
    return [kept_N, np.minimum(seconds[0], room - kept_N)]
