"""Batches of plain text: blocks in which each id is predicted from those before it, and pieces for any objective.

Shape suffixes: B rows of a batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from numpy import ndarray

from clearhead.data.batches.base import NO_LABEL, Batch, EpochBatches, LengthSortedPlan, random_stream
from clearhead.data.batches.packing import pack_pieces
from clearhead.data.batches.windows import Windows, cut_windows
from clearhead.data.stores.arrays import Indices
from clearhead.data.stores.corpus import Corpus
from clearhead.errors import InputError

Piece = Int64[ndarray, " _"]
Objective = Callable[[Sequence[Any], np.random.Generator], Batch]

# Keeps the choice of an epoch's layout apart from the order of its batches and from what is drawn for each of them.
_LAYOUT_STREAM = 1


def causal_batches(corpus: Corpus, *, block: int, batch_tokens: int, pack: bool, seed: int) -> EpochBatches[Batch]:
    """Return endless training batches in which every id but the start token is predicted once in an epoch.

    Every epoch cuts long documents at other places.

    Args:
        corpus: the documents.
        block: the longest row.
        batch_tokens: the most that rows * longest row may be in a batch.
        pack: fill rows with several documents, each of which is read as if it were alone.
        seed: from 0; decides the cuts and the order of every epoch.

    Raises:
        InputError: the block does not fit into a batch, or the seed is negative.
    """
    plan = _Plan(corpus, length=block, batch_tokens=batch_tokens, seed=seed, pack=pack, framed=False)

    def make(rows: Indices, epoch: int, index: int) -> Batch:
        layout = plan.layout(epoch)
        return _causal_batch(corpus, layout.pieces, [layout.row(row) for row in rows], rows)

    return EpochBatches(plan, make, identity={"kind": "causal", "block": block, "pack": pack, **plan.identity()})


def causal_epoch(corpus: Corpus, *, block: int, batch_tokens: int) -> Iterator[Batch]:
    """Go once through windows that do not overlap, one in each row, in order of length: what a validation does.

    Args:
        corpus: the documents.
        block: the length of a window.
        batch_tokens: the most that rows * longest row may be in a batch.

    Raises:
        InputError: the block does not fit into a batch.
    """
    _check_budget(block, batch_tokens)
    pieces = cut_windows(corpus, block)
    plan = LengthSortedPlan(pieces.lengths, pieces.lengths, batch_tokens=batch_tokens, seed=0, shuffle=False)
    return (_causal_batch(corpus, pieces, [np.array([row]) for row in rows], rows) for rows in plan.epoch(0))


def window_batches(
    corpus: Corpus, objective: Objective, *, length: int, batch_tokens: int, seed: int
) -> EpochBatches[Batch]:
    """Return endless training batches of framed pieces, of which an objective makes what the model reads and says.

    Every epoch cuts long documents at other places.

    Args:
        corpus: the documents.
        objective: makes a batch of some pieces, ids with a start and an end token, and of a source of chance.
        length: the longest piece, its start and end token included.
        batch_tokens: the most that rows * longest piece may be in a batch.
        seed: from 0; decides the cuts, the order and the chances of every epoch.

    Raises:
        InputError: a piece does not fit into a batch, or the seed is negative.
    """
    plan = _Plan(corpus, length=length, batch_tokens=batch_tokens, seed=seed, pack=False, framed=True)

    def make(rows: Indices, epoch: int, index: int) -> Batch:
        pieces = plan.layout(epoch).pieces
        return _objective_batch(corpus, pieces, rows, objective, random_stream(seed, epoch, index))

    return EpochBatches(plan, make, identity={"kind": "pieces", "length": length, **plan.identity()})


def window_epoch(corpus: Corpus, objective: Objective, *, length: int, batch_tokens: int) -> Iterator[Batch]:
    """Go once through framed pieces in order of length, with the same chances every time: what a validation does.

    Args:
        corpus: the documents.
        objective: as of `piece_batches`.
        length: the longest piece, its start and end token included.
        batch_tokens: the most that rows * longest piece may be in a batch.

    Raises:
        InputError: a piece does not fit into a batch.
    """
    _check_budget(length, batch_tokens)
    pieces = cut_windows(corpus, length, framed=True)
    plan = LengthSortedPlan(pieces.lengths, pieces.lengths, batch_tokens=batch_tokens, seed=0, shuffle=False)
    return (
        _objective_batch(corpus, pieces, rows, objective, random_stream(0, 0, index))
        for index, rows in enumerate(plan.epoch(0))
    )


@dataclass(frozen=True)
class _Layout:
    """The rows of an epoch: its pieces, and which of them each row holds; without blocks each row holds one."""

    pieces: Windows
    blocks: list[Indices] | None

    def row(self, number: int | np.int64) -> Indices:
        """Return the pieces of one row."""
        return np.array([number]) if self.blocks is None else self.blocks[number]

    @property
    def lengths(self) -> Int64[ndarray, " rows"]:
        """How many ids each row holds."""
        if self.blocks is None:
            return self.pieces.lengths
        sums = np.add.reduceat(self.pieces.lengths[np.concatenate(self.blocks)], _starts(self.blocks))
        return sums.astype(np.int64)


def _starts(blocks: Sequence[Indices]) -> Int64[ndarray, " blocks"]:
    counts = np.fromiter(map(len, blocks), dtype=np.int64, count=len(blocks))
    return np.cumsum(counts) - counts


class _Plan:
    """Which rows go together in each epoch, and what the rows are; the layout of one epoch is kept at a time."""

    def __init__(self, corpus: Corpus, *, length: int, batch_tokens: int, seed: int, pack: bool, framed: bool) -> None:
        if seed < 0:
            raise InputError(f"seed is {seed}; expected 0 or more")
        _check_budget(length, batch_tokens)
        self._corpus = corpus
        self._length, self._batch_tokens, self._seed = length, batch_tokens, seed
        self._pack, self._framed = pack, framed
        self._kept: tuple[int, _Layout] | None = None

    def identity(self) -> dict[str, Any]:
        """Return what tells these batches from others."""
        return {"batch_tokens": self._batch_tokens, "seed": self._seed, "data": self._corpus.identity}

    def layout(self, epoch: int) -> _Layout:
        """Return the rows of an epoch."""
        if self._kept is None or self._kept[0] != epoch:
            self._kept = (epoch, self._lay_out(epoch))
        return self._kept[1]

    def _lay_out(self, epoch: int) -> _Layout:
        # Raw bits: numpy keeps this stream the same for ever, which it does not promise for its distributions.
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch, 0, _LAYOUT_STREAM]))
        room = self._length - (len(self._corpus.special.alone) if self._framed else 0)
        offset = int(bits.random_raw() % room)
        pieces = cut_windows(self._corpus, self._length, offset=offset, framed=self._framed)
        if not self._pack:
            return _Layout(pieces, None)
        # Pieces of one length meet others in every epoch.
        order = np.argsort(bits.random_raw(len(pieces)), kind="stable")
        return _Layout(pieces, [order[packed] for packed in pack_pieces(pieces.lengths[order], self._length)])

    def epoch(self, number: int) -> list[Indices]:
        """Return the batches of an epoch, each the indices of its rows."""
        lengths = self.layout(number).lengths
        batches = LengthSortedPlan(lengths, lengths, batch_tokens=self._batch_tokens, seed=self._seed)
        return batches.epoch(number)


def _check_budget(length: int, batch_tokens: int) -> None:
    if length > batch_tokens:
        raise InputError(
            f"batch_tokens is {batch_tokens}, less than one row of max_length {length}; "
            f"raise batch_tokens to at least {length}, or lower max_length"
        )


def _causal_batch(corpus: Corpus, pieces: Windows, blocks: Sequence[Indices], rows: Indices) -> Batch:
    """Lay pieces out as rows; what follows the last piece of a row is padding."""
    rows_of_ids = [[pieces.ids(corpus, index) for index in block] for block in blocks]
    lengths_B = np.array([sum(map(len, row)) for row in rows_of_ids])
    shape = (len(blocks), int(lengths_B.max()))
    ids_BT = np.full(shape, corpus.special.pad, dtype=np.int64)
    labels_BT = np.full(shape, NO_LABEL, dtype=np.int64)
    documents_BT = np.zeros(shape, dtype=np.int64)
    for row, block in enumerate(blocks):
        place = 0
        for number, (index, ids) in enumerate(zip(block, rows_of_ids[row], strict=True)):
            here = slice(place, place + len(ids))
            ids_BT[row, here] = ids
            labels_BT[row, here] = pieces.labels(corpus, index)
            documents_BT[row, here] = number
            place = here.stop
    mask_BT = np.arange(shape[1]) < lengths_B[:, None]
    num_tokens = int(lengths_B.sum())
    return Batch(
        ids=torch.from_numpy(ids_BT),
        mask=None if mask_BT.all() else torch.from_numpy(mask_BT),
        labels=torch.from_numpy(labels_BT),
        num_labels=num_tokens,
        num_tokens=num_tokens,
        rows=rows,
        documents=torch.from_numpy(documents_BT) if any(len(block) > 1 for block in blocks) else None,
    )


def _objective_batch(
    corpus: Corpus, pieces: Windows, rows: Indices, objective: Objective, chance: np.random.Generator
) -> Batch:
    return replace(objective([pieces.ids(corpus, row) for row in rows], chance), rows=rows)
