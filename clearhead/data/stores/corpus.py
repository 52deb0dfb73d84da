"""Tokenized documents, streamed from a text into memory-mapped arrays; neither text nor ids need fit in memory."""

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

    def boundary_ids(self, document: int) -> PrefixSuffix:
        """Return the ids around those of a document in its sequence."""
        return self.tokenizer.special_tokens.for_target

    def sequence(self, document: int, start: int, stop: int) -> Int64[ndarray, " _"]:
        """Return a part of a document's sequence.

        Args:
            document: the number of the document.
            start: where the part begins; 0 is the first special id in front of the document.
            stop: where it ends.
        """
        special, ids = self.boundary_ids(document), self.documents[document]
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


def _report(store: Store) -> str:
    documents = store.texts[0]
    return f"{len(documents.ids):,} tokens in {count_noun(len(documents), 'document')}"


_KIND = StoreKind("corpora", "tokenized text", ("document",), _report, separate_lengths)


class Corpus(Documents, Store):
    """Tokenized documents in a folder.

    Args:
        folder: the store's folder.
        tokenizer: what the text was tokenized with.

    Attributes:
        documents: the ids of every document.
        largest_id: the largest of them.
        text_bytes: bytes of the text in UTF-8.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        Store.__init__(self, folder, _KIND, special=(0,))
        Documents.__init__(self, self.texts[0], tokenizer)
        self.largest_id: int = int(self.facts["largest_id"])
        self.text_bytes: int = int(self.facts["bytes"])


def prepare_corpus(source: TextSource, tokenizer: Tokenizer, *, share: Share = WHOLE) -> Corpus:
    """Tokenize a text, or open what an earlier run made of the same content.

    Args:
        source: where the text comes from.
        tokenizer: turns it into ids.
        share: where the part to take begins and ends, each from 0 to 1: by characters where the source is one
            document, else by documents.

    Raises:
        InputError: the source is unusable, or the share has no text in it.
        RunFailure: the cache cannot be written.
    """

    def make(folder: Path) -> None:
        writer = ArrayWriter(folder)
        record = _write(writer, read_chunks(source, share, measure(source)), tokenizer)
        if record["largest_id"] < 0:
            raise InputError(f"{source.location(0)}: the tokenizer finds no token in the text from here on")
        writer.finish(record)

    inputs = [source.identity(), tokenizer.fingerprint, share]
    return load_or_make(_KIND.name, inputs, lambda folder: Corpus(folder, tokenizer), make)


def _write(writer: ArrayWriter, chunks: Iterable[TextChunk], tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the ids and offsets of all documents that have a token; return the record."""
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
