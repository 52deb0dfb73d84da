"""What the objectives share: rows of different lengths behind each other, chance within rows, and rows as rectangles.

Shape suffixes: N tokens of all rows, B rows, T columns of a rectangle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Integer
from numpy import ndarray
from torch import Tensor

from clearhead.data.batches.base import NO_LABEL, Batch
from clearhead.errors import InputError
from clearhead.text.special_tokens import PrefixSuffix
from clearhead.text.tokenizer import Tokenizer

_NOTHING = PrefixSuffix()

Piece = Integer[ndarray, " _"]


@dataclass(frozen=True)
class Ragged:
    """Rows of ids of different lengths, one behind the other.

    Args:
        ids: the ids of all rows.
        counts: how many of them each row has.
    """

    ids: Int64[ndarray, " tokens"]
    counts: Int64[ndarray, " rows"]

    @property
    def rows(self) -> Int64[ndarray, " tokens"]:
        """The row of each id."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def places(self) -> Int64[ndarray, " tokens"]:
        """The place of each id in its row, counted from 0."""
        return places(self.counts)

    def keep(self, kept_N: Bool[ndarray, " tokens"]) -> Ragged:
        """Return the rows without the ids that are not kept."""
        return Ragged(self.ids[kept_N], np.bincount(self.rows[kept_N], minlength=len(self.counts)).astype(np.int64))


@dataclass(frozen=True)
class PaddedRows:
    """Rows padded on the right: ids, and True where they are real."""

    ids: Int64[Tensor, "rows columns"]
    mask: Bool[Tensor, "rows columns"]

    @property
    def padded(self) -> Bool[Tensor, "rows columns"] | None:
        """The mask, or None where nothing is padded, so that attention need not look at it."""
        return None if bool(self.mask.all()) else self.mask


def ragged(pieces: Sequence[Piece]) -> Ragged:
    """Put whole pieces behind each other, with what stands around them."""
    counts = np.array([len(piece) for piece in pieces], dtype=np.int64)
    return Ragged(np.concatenate(pieces).astype(np.int64), counts)


def unframed(pieces: Sequence[Piece], tokenizer: Tokenizer) -> Ragged:
    """Put the texts of pieces behind each other, without what the tokenizer put around each."""
    around = tokenizer.special_tokens.for_text
    assert all(len(piece) >= len(around) for piece in pieces), "a piece has its tokenizer's frame around it"
    return ragged([piece[len(around.prefix) : len(piece) - len(around.suffix)] for piece in pieces])


def rectangle(rows: Ragged, around: PrefixSuffix = _NOTHING, *, fill: int) -> PaddedRows:
    """Lay rows out as a rectangle.

    Args:
        rows: the ids of each row.
        around: what stands in front of each row and behind it.
        fill: the id of the padding.
    """
    front = len(around.prefix)
    lengths_B1 = rows.counts[:, None] + len(around)
    column_T = np.arange(int(lengths_B1.max()))
    ids_BT = np.full((len(rows.counts), len(column_T)), fill, dtype=np.int64)
    ids_BT[(column_T >= front) & (column_T < rows.counts[:, None] + front)] = rows.ids
    ids_BT[:, :front] = around.prefix
    for place, index in enumerate(around.suffix):
        ids_BT[np.arange(len(rows.counts)), rows.counts + front + place] = index
    return PaddedRows(torch.from_numpy(ids_BT), torch.from_numpy(column_T < lengths_B1))


def two_sided(source: Ragged, target: Ragged, tokenizer: Tokenizer) -> Batch:
    """Make a batch for two stacks: the encoder reads the source, the decoder learns to say the target.

    Args:
        source: what the encoder reads, without special ids of its own.
        target: what the decoder should say.
        tokenizer: its frame stands around the rows.
    """
    around = tokenizer.special_tokens.for_target
    read = rectangle(source, tokenizer.special_tokens.for_source, fill=tokenizer.pad_id)
    fed = rectangle(target, around.decoder_input, fill=tokenizer.pad_id)
    said = rectangle(target, around.labels, fill=NO_LABEL)
    num_labels = int(said.mask.sum())
    return Batch(
        ids=read.ids,
        mask=read.mask,
        target_ids=fed.ids,
        target_mask=fed.mask,
        labels=said.ids,
        num_labels=num_labels,
        num_tokens=int(read.mask.sum()) + num_labels,
        rows=np.arange(len(source.counts)),
    )


def places(counts: Int64[ndarray, " rows"]) -> Int64[ndarray, " items"]:
    """Count the items of each row from 0, for rows behind each other."""
    counted: Int64[ndarray, " items"] = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return counted


def ranks(keys_N: Float[ndarray, " items"], counts: Int64[ndarray, " rows"]) -> Int64[ndarray, " items"]:
    """Return the place that each item would have in its row if its row were sorted by key, counted from 0."""
    rows = np.repeat(np.arange(len(counts)), counts)
    ranks_N = np.empty(len(keys_N), dtype=np.int64)
    ranks_N[np.lexsort((keys_N, rows))] = places(counts)
    return ranks_N


def sums(values_N: Integer[ndarray, " items"], counts: Int64[ndarray, " rows"]) -> Int64[ndarray, " rows"]:
    """Add up the items of each row."""
    totals = np.concatenate([[0], np.cumsum(values_N, dtype=np.int64)])
    ends = np.cumsum(counts)
    added: Int64[ndarray, " rows"] = totals[ends] - totals[ends - counts]
    return added


def check_share(share: float) -> float:
    """Return a share of tokens that can be noise.

    Raises:
        InputError: it is not above 0 and below 1.
    """
    if not 0.0 < share < 1.0:
        raise InputError(f"the share of noise is {share}; expected a number above 0 and below 1, 0.15 is usual")
    return share


def need_mask_id(tokenizer: Tokenizer) -> int:
    """Return the id of the mask token.

    Raises:
        InputError: the tokenizer has none.
    """
    if tokenizer.mask_id is None:
        raise InputError(
            "this objective hides tokens behind a mask token, but the tokenizer has none: train a tokenizer with one, "
            "or take one that has it"
        )
    return tokenizer.mask_id
