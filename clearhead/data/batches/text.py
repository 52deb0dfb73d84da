"""Batches of running text: documents are cut into windows, which are packed into blocks or noised by an objective.

Causal windows cut the sequence of a document, which has the special ids of a decoder target. The model reads a window
and predicts the same window shifted by one position. Other windows cut the plain ids, and each gets its special ids.

Shape suffixes: B rows of a batch, W windows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from clearhead.base.errors import InputError
from clearhead.base.progress import report_batches
from clearhead.core.kernels.linear_cross_entropy import NO_LABEL
from clearhead.data.arrays import Indices, Ragged, Rows, pack
from clearhead.data.batches.base import Batch, pad_rows
from clearhead.data.batches.plans import BatchPlan, EpochBatches, LengthSortedPlan, random_stream
from clearhead.data.stores.corpus import Corpus, Documents
from clearhead.text.special_tokens import PrefixSuffix


@dataclass(frozen=True)
class Windows:
    """Windows of documents: for each window its document and its range of tokens, in the order of the text.

    Args:
        document: the document number of each window.
        start: the position at which each window starts. Causal windows count in the sequence of the document, in which
            0 is the start token; other windows count in its plain ids.
        stop: the position at which each window ends, counted in the same way.
        special: the special ids that are added to each window. None means causal windows.
    """

    document: Int64[ndarray, " windows"]
    start: Int64[ndarray, " windows"]
    stop: Int64[ndarray, " windows"]
    special: PrefixSuffix | None = None

    def __len__(self) -> int:
        return len(self.document)

    @property
    def lengths(self) -> Int64[ndarray, " windows"]:
        """The number of ids of each window as the model reads it, special ids included."""
        lengths: Int64[ndarray, " windows"] = self.stop - self.start + len(self.special or ())
        return lengths

    def ids(self, corpus: Documents, index: int | np.int64) -> Int64[ndarray, " _"]:
        """Return the ids of one window as the model reads it, special ids included.

        Args:
            corpus: the documents from which the windows were cut.
            index: the number of the window.
        """
        document, start, stop = int(self.document[index]), int(self.start[index]), int(self.stop[index])
        if self.special is None:
            return corpus.sequence(document, start, stop)
        parts = (self.special.prefix, corpus.documents[document][start:stop], self.special.suffix)
        return np.concatenate(parts).astype(np.int64)

    def labels(self, corpus: Documents, index: int | np.int64) -> Int64[ndarray, " _"]:
        """Return the labels of one causal window: the next id at each position.

        Args:
            corpus: the documents from which the windows were cut.
            index: the number of the window.
        """
        assert self.special is None, "labels of the next id need causal windows"
        return corpus.sequence(int(self.document[index]), int(self.start[index]) + 1, int(self.stop[index]) + 1)


def cut_windows(
    corpus: Documents, length: int, *, offset: int = 0, stride: int | None = None, with_special: bool = False
) -> Windows:
    """Cut every document into windows that contain all of its ids; a document that fits into a window stays whole.

    Args:
        corpus: the documents.
        length: the maximum length of a window in ids, special ids included.
        offset: the length of the first window of a longer document, below the length of a window. 0 means a full
            window.
        stride: the distance between the starts of two windows, at most the length of a window; the last window ends
            with the document. None means that windows do not overlap.
        with_special: True if special ids are added to each window. False means causal windows.

    Raises:
        InputError: the length has no room for an id, or the offset or the stride is out of range.
    """
    special = corpus.tokenizer.special_tokens.for_text if with_special else None
    room = length - len(special or ())
    if room < 1:
        raise InputError(f"max_length is {length}; expected at least {length - room + 1} tokens, special ones included")
    if not 0 <= offset < room:
        raise InputError(f"offset is {offset}; expected 0 to {room - 1}")
    if stride is not None and not 1 <= stride <= room:
        raise InputError(f"stride is {stride}; expected 1 to {room}, or ids between two windows would be left out")
    sizes_D = corpus.documents.lengths if with_special else corpus.input_lengths[0]
    step = stride or room
    second = offset or step  # the start of the second window of a longer document
    if stride:
        more_D = 1 + np.maximum(-(-(sizes_D - room - second) // step), 0)
    else:
        more_D = -(-(sizes_D - second) // step)
    is_long_D = sizes_D > room
    count_D = 1 + np.where(is_long_D, more_D, 0)
    document = np.repeat(np.arange(len(corpus)), count_D)
    number = np.arange(len(document)) - np.repeat(np.cumsum(count_D) - count_D, count_D)
    size, is_long = sizes_D[document], is_long_D[document]
    start = np.where(number == 0, 0, second + (number - 1) * step)
    if stride:
        start = np.where(is_long, np.minimum(start, size - room), 0)
        stop = np.minimum(start + room, size)
    else:
        stop = np.where(is_long, np.minimum(second + number * step, size), size)
    return Windows(document, start, stop, special)


def pack_windows(lengths: Rows, block: int) -> Ragged:
    """Pack windows into blocks: each window, longest first, goes into the fullest block that has room for it.

    Args:
        lengths: the length of each window, from 1 to `block`; windows of equal length keep their order.
        block: the capacity of a block in ids.

    Returns:
        The window numbers of each block, longest first; every window is in exactly one block.

    Source: arXiv 2404.10830, section 3.1 (best-fit decreasing).
    """
    order = np.argsort(-lengths, kind="stable")
    assert not len(order) or 1 <= lengths[order[-1]] <= lengths[order[0]] <= block, "a window must fit a block"
    blocks: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(block + 1)]  # blocks by the room that is left in them
    rooms = 0  # bit r is set if some block has room r
    for window, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
            blocks[chosen].append(window)
        else:
            room, chosen = block, len(blocks)
            blocks.append([window])
        left = room - length
        if left:
            with_room[left].append(chosen)
            rooms |= 1 << left
    return pack(blocks, np.dtype(np.int64))


Objective = Callable[[Sequence[Any], np.random.Generator], Batch]

# Number of the random stream for the windows of an epoch; batch order and noise have other streams.
_WINDOW_STREAM = 1
HELD_OUT_TOKENS = 8192


@dataclass(frozen=True)
class View:
    """Recipe for training batches of documents: the plan that chooses windows, and the function that makes a batch.

    Attributes:
        plan: the plan that chooses the windows of each batch.
        make: the function that makes a batch, as in `EpochBatches`.
        identity: JSON values that identify the settings of this view, such as the seed.
    """

    plan: BatchPlan
    make: Callable[[Indices, int, int], Batch]
    identity: Mapping[str, Any]

    def batches(self, data: str) -> EpochBatches[Batch]:
        """Return endless training batches of the documents; `data` is the hash of the documents."""
        return EpochBatches(self.plan, self.make, identity={**self.identity, "data": data})


def causal_view(documents: Documents, *, block: int, batch_tokens: int, pack: bool, seed: int) -> View:
    """Return a view for causal language modelling: every id except the start token is predicted once per epoch.

    Every epoch cuts long documents at other positions.

    Args:
        documents: the documents.
        block: the maximum length of a row in tokens.
        batch_tokens: the maximum of rows * longest row in a batch.
        pack: True if a row may hold several documents; each document attends to itself alone.
        seed: the seed of cuts and order, at least 0.

    Raises:
        InputError: the block does not fit into a batch, or the seed is negative.
    """
    plan = _WindowPlan(documents, length=block, batch_tokens=batch_tokens, seed=seed, pack=pack, with_special=False)

    def make(rows: Indices, epoch: int, index: int) -> Batch:
        windows, blocks = plan.layout(epoch)
        return _causal_batch(documents, windows, blocks.take(rows), rows)

    identity = {"kind": "causal", "block": block, "pack": pack, "batch_tokens": batch_tokens, "seed": seed}
    return View(plan, make, identity)


def causal_epoch(corpus: Corpus, *, block: int, batch_tokens: int) -> Iterator[Batch]:
    """Yield batches of causal windows that do not overlap, one window per row, once and in order of length.

    Args:
        corpus: the documents.
        block: the maximum length of a window in tokens.
        batch_tokens: the maximum of rows * longest row in a batch.

    Raises:
        InputError: the block does not fit into a batch.
    """
    _check_budget(block, batch_tokens)
    windows = cut_windows(corpus, block)
    plan = LengthSortedPlan(windows.lengths, batch_tokens=batch_tokens, seed=0, shuffle=False)
    return (_causal_batch(corpus, windows, _single_window_blocks(rows), rows) for rows in plan.epoch(0))


def window_view(documents: Documents, objective: Objective, *, length: int, batch_tokens: int, seed: int) -> View:
    """Return a view of windows with special ids, from which an objective makes inputs and labels.

    Every epoch cuts long documents at other positions.

    Args:
        documents: the documents.
        objective: a function that makes a batch of some windows with a random generator.
        length: the maximum length of a window in tokens, special tokens included.
        batch_tokens: the maximum of rows * longest window in a batch.
        seed: the seed of cuts, order and noise, at least 0.

    Raises:
        InputError: a window does not fit into a batch, or the seed is negative.
    """
    plan = _WindowPlan(documents, length=length, batch_tokens=batch_tokens, seed=seed, pack=False, with_special=True)

    def make(rows: Indices, epoch: int, index: int) -> Batch:
        return _objective_batch(documents, plan.layout(epoch)[0], rows, objective, random_stream(seed, epoch, index))

    return View(plan, make, {"kind": "windows", "length": length, "batch_tokens": batch_tokens, "seed": seed})


def window_epoch(corpus: Corpus, objective: Objective, *, length: int) -> Iterator[Batch]:
    """Yield batches of windows with special ids, once and in order of length, with the same noise in every call.

    The noise is drawn per batch. Therefore every measurement of a text uses the same batch size.

    Args:
        corpus: the documents.
        objective: the objective of `window_view`.
        length: the maximum length of a window in tokens, special tokens included.
    """
    windows = cut_windows(corpus, length, with_special=True)
    plan = LengthSortedPlan(windows.lengths, batch_tokens=max(HELD_OUT_TOKENS, length), seed=0, shuffle=False)
    return (
        _objective_batch(corpus, windows, rows, objective, random_stream(0, 0, index))
        for index, rows in enumerate(report_batches(plan.epoch(0), len(plan)))
    )


class _WindowPlan:
    """A plan of windows or blocks: cuts the documents anew in each epoch, and holds the layout of one epoch."""

    def __init__(
        self, documents: Documents, *, length: int, batch_tokens: int, seed: int, pack: bool, with_special: bool
    ) -> None:
        if seed < 0:
            raise InputError(f"seed is {seed}; expected 0 or more")
        _check_budget(length, batch_tokens)
        self._documents = documents
        self._length, self._batch_tokens, self._seed = length, batch_tokens, seed
        self._pack, self._with_special = pack, with_special
        self._kept: tuple[int, tuple[Windows, Ragged]] | None = None

    def layout(self, epoch: int) -> tuple[Windows, Ragged]:
        """Return the windows of an epoch, and for each block the numbers of its windows."""
        if self._kept is None or self._kept[0] != epoch:
            self._kept = (epoch, self._lay_out(epoch))
        return self._kept[1]

    def _lay_out(self, epoch: int) -> tuple[Windows, Ragged]:
        # Raw bits: numpy guarantees that this stream never changes, but not its distributions.
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch, 0, _WINDOW_STREAM]))
        num_special = len(self._documents.tokenizer.special_tokens.for_text) if self._with_special else 0
        offset = int(bits.random_raw() % (self._length - num_special))
        windows = cut_windows(self._documents, self._length, offset=offset, with_special=self._with_special)
        if not self._pack:
            return windows, _single_window_blocks(np.arange(len(windows)))
        # Random order of windows with equal lengths: they share blocks with others in every epoch.
        order = np.argsort(bits.random_raw(len(windows)), kind="stable")
        packed = pack_windows(windows.lengths[order], self._length)
        return windows, Ragged(order[packed.ids], packed.offsets)

    def epoch(self, number: int) -> list[Indices]:
        """Return the batches of an epoch as arrays of row numbers."""
        return self._plan_epoch(number).epoch(number)

    def num_sizes(self) -> int:
        """Return the number of different batch sizes (in padded tokens) in the first epoch."""
        return self._plan_epoch(0).num_sizes()

    def has_one_length(self) -> bool:
        """Return whether the batches of the first epoch have one padded length, except at most one batch."""
        return self._plan_epoch(0).has_one_length()

    def _plan_epoch(self, number: int) -> LengthSortedPlan:
        lengths = _block_lengths(*self.layout(number))
        return LengthSortedPlan(lengths, batch_tokens=self._batch_tokens, seed=self._seed)


def _check_budget(length: int, batch_tokens: int) -> None:
    if length > batch_tokens:
        raise InputError(
            f"batch_tokens is {batch_tokens}, less than one row of max_length {length}; "
            f"raise batch_tokens to at least {length}, or lower max_length"
        )


def _single_window_blocks(windows: Indices) -> Ragged:
    """Return blocks with one window each."""
    return Ragged(windows, np.arange(len(windows) + 1))


def _block_lengths(windows: Windows, blocks: Ragged) -> Int64[ndarray, " blocks"]:
    """Return the number of ids of each block."""
    sums: Int64[ndarray, " blocks"] = np.add.reduceat(windows.lengths[blocks.ids], blocks.offsets[:-1])
    return sums


def _causal_batch(corpus: Documents, windows: Windows, blocks: Ragged, rows: Indices) -> Batch:
    """Make a batch for causal language modelling: each of the chosen blocks is one row."""
    lengths_B = _block_lengths(windows, blocks)
    ids_N = np.concatenate([windows.ids(corpus, index) for index in blocks.ids])
    labels_N = np.concatenate([windows.labels(corpus, index) for index in blocks.ids])
    read = pad_rows(Ragged.of(ids_N, lengths_B), fill=corpus.tokenizer.pad_id)
    documents = None
    if len(blocks.ids) > len(blocks):
        numbers_N = np.repeat(blocks.positions, windows.lengths[blocks.ids])
        documents = pad_rows(Ragged.of(numbers_N, lengths_B), fill=0).ids
    return Batch(
        ids=read.ids,
        mask=read.padding_mask,
        labels=pad_rows(Ragged.of(labels_N, lengths_B), fill=NO_LABEL).ids,
        num_labels=len(ids_N),
        num_tokens=len(ids_N),
        rows=rows,
        documents=documents,
    )


def _objective_batch(
    corpus: Documents, windows: Windows, rows: Indices, objective: Objective, generator: np.random.Generator
) -> Batch:
    return replace(objective([windows.ids(corpus, row) for row in rows], generator), rows=rows)
