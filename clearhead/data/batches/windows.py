"""Cuts documents into windows that fit a model, and packs windows of unequal lengths into full blocks.

Causal windows cut a document's sequence, which has the special ids of a decoder's target: a window is read, and the
same window one position further on is predicted. Other windows cut the plain ids, and each gets special ids of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from clearhead.base.errors import InputError
from clearhead.data.arrays import Ragged, Rows, pack
from clearhead.data.stores.corpus import Documents
from clearhead.text.special_tokens import PrefixSuffix


@dataclass(frozen=True)
class Windows:
    """Windows of documents, in the order of the text.

    Args:
        document: the document of each window.
        start: where each begins: in the document's sequence (0 is the start token), or, with special ids, in its plain
            ids.
        stop: where each ends, counted in the same way.
        special: the special ids of each window; None: causal windows.
    """

    document: Int64[ndarray, " windows"]
    start: Int64[ndarray, " windows"]
    stop: Int64[ndarray, " windows"]
    special: PrefixSuffix | None = None

    def __len__(self) -> int:
        return len(self.document)

    @property
    def lengths(self) -> Int64[ndarray, " windows"]:
        """The number of ids that the model reads of each window, special ones included."""
        lengths: Int64[ndarray, " windows"] = self.stop - self.start + len(self.special or ())
        return lengths

    def ids(self, corpus: Documents, index: int | np.int64) -> Int64[ndarray, " _"]:
        """Return what the model reads of one window, special ids included.

        Args:
            corpus: the documents that were cut.
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
            corpus: the documents that were cut.
            index: the number of the window.
        """
        assert self.special is None, "only causal windows predict the next id"
        return corpus.sequence(int(self.document[index]), int(self.start[index]) + 1, int(self.stop[index]) + 1)


def cut_windows(
    corpus: Documents, length: int, *, offset: int = 0, stride: int | None = None, with_special: bool = False
) -> Windows:
    """Cut every document into windows, so that each of its ids is in one; a document that fits stays whole.

    Args:
        corpus: the documents.
        length: the longest window, in ids that the model reads, special ones included.
        offset: how many ids the first window of a longer document has, below the length of a window; 0: a full window.
        stride: how far each window begins behind the one before it, up to the length of a window; the last one ends
            with the document. None: windows do not overlap.
        with_special: whether each window gets special ids of its own; False: causal windows.

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
    second = offset or step  # where the second window of a longer document begins
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
    """Put each window, the longest first, into the fullest block that has room for it.

    Args:
        lengths: of the windows, each from 1 to the block. Among equal ones their order decides.
        block: how much a block holds.

    Returns:
        The windows of each block, longest first; every window is in exactly one.

    Source: arXiv 2404.10830, section 3.1 (best-fit decreasing).
    """
    order = np.argsort(-lengths, kind="stable")
    assert not len(order) or 1 <= lengths[order[-1]] <= lengths[order[0]] <= block, "windows fit into a block"
    blocks: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(block + 1)]  # the blocks that have so much room left
    rooms = 0  # bit r is set where some block has room r
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
