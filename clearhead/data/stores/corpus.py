"""Tokenized documents in memory-mapped arrays; neither the text nor the ids need to fit in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from clearhead.base.errors import InputError
from clearhead.data.arrays import Ragged, Rows
from clearhead.data.cache import load_or_make
from clearhead.data.sources.tables import WHOLE, Share
from clearhead.data.sources.texts import TextChunk, TextSource, measure, read_chunks
from clearhead.data.stores.store import ArrayWriter, Store, StoreKind, separate_lengths
from clearhead.data.tokenize.document_chunks import encode_chunks
from clearhead.spec.describe import count_noun
from clearhead.text.special_tokens import PrefixSuffix
from clearhead.text.tokenizer import Tokenizer


class Documents:
    """Tokenized documents.

    A document is stored without special ids. Its sequence is its ids with the special ids of a decoder target.

    Args:
        documents: the ids of every document.
        tokenizer: the tokenizer that made the ids.
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

    def boundary_ids(self, document: int) -> PrefixSuffix:
        """Return the special ids before and after a document."""
        return self.tokenizer.special_tokens.for_target

    def sequence(self, document: int, start: int, stop: int) -> Int64[ndarray, " _"]:
        """Return a slice of the sequence of a document.

        Args:
            document: the number of the document.
            start: the start of the slice; 0 is the first special id before the document.
            stop: the end of the slice, not included.
        """
        special, ids = self.boundary_ids(document), self.documents[document]
        front, last = len(special.prefix), len(special.prefix) + len(ids)
        assert 0 <= start < stop <= last + len(special.suffix), "the slice is empty or lies outside the sequence"
        parts = (
            special.prefix[start:stop],
            ids[max(start - front, 0) : max(stop - front, 0)],
            special.suffix[max(start - last, 0) : max(stop - last, 0)],
        )
        return np.concatenate(parts).astype(np.int64)

    @property
    def input_lengths(self) -> tuple[Rows]:
        """The number of ids that the model reads of each sequence: all but the last, which is only predicted."""
        return (self.documents.lengths + len(self.tokenizer.special_tokens.for_target) - 1,)


def _report(store: Store) -> str:
    documents = store.texts[0]
    return f"{len(documents.ids):,} tokens in {count_noun(len(documents), 'document')}"


_KIND = StoreKind("corpora", "tokenized text", ("document",), _report, separate_lengths)


class Corpus(Documents, Store):
    """A store of tokenized documents.

    Args:
        folder: the folder of the store.
        tokenizer: the tokenizer that made the ids.

    Attributes:
        documents: the ids of every document.
        largest_id: the largest id in the documents.
        text_bytes: the size of the text in bytes of UTF-8.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        Store.__init__(self, folder, _KIND, special=(0,))
        Documents.__init__(self, self.texts[0], tokenizer)
        self.largest_id: int = int(self.facts["largest_id"])
        self.text_bytes: int = int(self.facts["bytes"])


def prepare_corpus(source: TextSource, tokenizer: Tokenizer, *, share: Share = WHOLE) -> Corpus:
    """Tokenize a text into a store, or open the cached store of the same content.

    Args:
        source: the source of the text.
        tokenizer: the tokenizer.
        share: the start and the end of the share to tokenize, as in `read_chunks`.

    Raises:
        InputError: the source cannot be read, or the share has no text.
        RunFailure: the cache cannot be written.
    """

    def make(folder: Path) -> None:
        writer = ArrayWriter(folder)
        record = _write(writer, read_chunks(source, share, measure(source)), tokenizer)
        if record["largest_id"] < 0:
            raise InputError(
                f"{source.location(0)}: the tokenizer finds no token in the text from here on; try another tokenizer"
            )
        writer.finish(record)

    inputs = [source.identity(), tokenizer.fingerprint, share]
    return load_or_make(_KIND.name, inputs, lambda folder: Corpus(folder, tokenizer), make)


def _write(writer: ArrayWriter, chunks: Iterable[TextChunk], tokenizer: Tokenizer) -> dict[str, Any]:
    """Write ids and offsets of all documents with a token into a store, and return facts about the store."""
    end = length = num_bytes = 0
    largest = -1

    def count_bytes() -> Iterator[TextChunk]:
        nonlocal num_bytes
        for chunk in chunks:
            num_bytes += len(chunk.text.encode())
            yield chunk

    offsets = [0]
    for rows, starts in encode_chunks(count_bytes(), tokenizer):
        for row_length, is_new in zip(rows.lengths.tolist(), starts, strict=True):
            if is_new and length:
                end += length
                offsets.append(end)
                length = 0
            length += row_length
        if len(rows.ids):
            largest = max(largest, int(rows.ids.max()))
        writer.append("document_ids", rows.ids)
        writer.append("document_offsets", np.array(offsets, dtype=np.int64))
        offsets = []
    if length:
        writer.append("document_offsets", np.array([end + length], dtype=np.int64))
    return {"largest_id": largest, "bytes": num_bytes}
