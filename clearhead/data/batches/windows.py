"""Cuts documents into the pieces that a model reads.

Two ways to look at a document of n ids. Causal: its sequence is start token, ids, end token; a piece of it is read, and
the same piece one place further on is predicted, so that n + 1 places are read. Framed: its n ids are cut, and around
every piece stands what its tokenizer puts around a text, a start and an end token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from clearhead.data.stores.corpus import Corpus
from clearhead.errors import InputError
from clearhead.text.special_tokens import PrefixSuffix


@dataclass(frozen=True)
class Windows:
    """Stretches of documents, in the order of the text.

    Args:
        document: the document of each piece.
        start: where each begins: in the document's sequence (0 is the start token), or, framed, in its plain ids.
        stop: where each ends, counted in the same way.
        frame: what stands around each piece; None: pieces of sequences.
    """

    document: Int64[ndarray, " pieces"]
    start: Int64[ndarray, " pieces"]
    stop: Int64[ndarray, " pieces"]
    frame: PrefixSuffix | None = None

    def __len__(self) -> int:
        return len(self.document)

    @property
    def lengths(self) -> Int64[ndarray, " pieces"]:
        """How many ids the model reads of each piece, special ones included."""
        lengths: Int64[ndarray, " pieces"] = self.stop - self.start + (0 if self.frame is None else len(self.frame))
        return lengths

    def ids(self, corpus: Corpus, index: int | np.int64) -> Int64[ndarray, " _"]:
        """Return what the model reads of one piece, special ids included.

        Args:
            corpus: the documents that were cut.
            index: the number of the piece.
        """
        document, start, stop = int(self.document[index]), int(self.start[index]), int(self.stop[index])
        if self.frame is None:
            return corpus.sequence(document, start, stop)
        parts = (self.frame.prefix, corpus.documents[document][start:stop], self.frame.suffix)
        return np.concatenate(parts).astype(np.int64)

    def labels(self, corpus: Corpus, index: int | np.int64) -> Int64[ndarray, " _"]:
        """Return what the model should say at each place of one causal piece: the id behind it.

        Args:
            corpus: the documents that were cut.
            index: the number of the piece.
        """
        assert self.frame is None, "only causal pieces predict the id behind each"
        return corpus.sequence(int(self.document[index]), int(self.start[index]) + 1, int(self.stop[index]) + 1)


def cut_windows(
    corpus: Corpus, length: int, *, offset: int = 0, stride: int | None = None, framed: bool = False
) -> Windows:
    """Cut every document into pieces, so that each of its ids is in one; a document that fits stays whole.

    Args:
        corpus: the documents.
        length: the longest piece, in ids that the model reads, special ones included.
        offset: how many ids the first piece of a longer document has, below the length of a piece; 0: as many as any.
        stride: how far each window begins behind the one before it, up to the length of a piece; the last one ends
            with the document. None: pieces do not overlap.
        framed: whether each piece gets a start and an end token of its own.

    Raises:
        InputError: the length has no room for an id, or the offset or the stride is out of range.
    """
    frame = corpus.special.alone if framed else None
    room = length - (0 if frame is None else len(frame))
    if room < 1:
        raise InputError(f"max_length is {length}; expected at least {length - room + 1} tokens, special ones included")
    if not 0 <= offset < room:
        raise InputError(f"offset is {offset}; expected 0 to {room - 1}")
    if stride is not None and not 1 <= stride <= room:
        raise InputError(f"stride is {stride}; expected 1 to {room}, or ids between two windows would be left out")
    sizes_D = corpus.documents.lengths if framed else corpus.read_lengths
    step = stride or room
    second = offset or step  # where the second piece of a longer document begins
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
    return Windows(document, start, stop, frame)
