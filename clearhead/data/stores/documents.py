"""Tokenized documents, wherever their ids are kept."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from clearhead.data.arrays import Ragged, Rows
from clearhead.text.special_tokens import PrefixSuffix
from clearhead.text.tokenizer import Tokenizer


class Documents:
    """Tokenized documents.

    A document is kept without special ids; its sequence is these ids with the special ids of a decoder's target.

    Args:
        documents: the ids of every document.
        tokenizer: what the text was tokenized with.
    """

    def __init__(self, documents: Ragged, tokenizer: Tokenizer) -> None:
        self.documents: Ragged = documents
        self.tokenizer: Tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def num_tokens(self) -> int:
        """The number of ids in all documents together, without special ids."""
        return len(self.documents.ids)

    def around(self, document: int) -> PrefixSuffix:
        """Return the ids around those of a document in its sequence."""
        return self.tokenizer.special_tokens.for_target

    def sequence(self, document: int, start: int, stop: int) -> Int64[ndarray, " _"]:
        """Return a part of a document's sequence.

        Args:
            document: the number of the document.
            start: where the part begins; 0 is the first special id in front of the document.
            stop: where it ends.
        """
        special, ids = self.around(document), self.documents[document]
        front, last = len(special.prefix), len(special.prefix) + len(ids)
        assert 0 <= start < stop <= last + len(special.suffix), "a part of a sequence lies within it"
        parts = (
            special.prefix[start:stop],
            ids[max(start - front, 0) : max(stop - front, 0)],
            special.suffix[max(start - last, 0) : max(stop - last, 0)],
        )
        return np.concatenate(parts).astype(np.int64)

    @property
    def input_lengths(self) -> tuple[Rows]:
        """The number of ids of each document's sequence that are read: all but the last, which is only predicted."""
        return (self.documents.lengths + len(self.tokenizer.special_tokens.for_target) - 1,)
