"""Tokenized text: streamed from its source into memory-mapped arrays; neither text nor ids need fit in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from clearhead.data.sources.tables import WHOLE, Share
from clearhead.data.sources.texts import TextChunk, TextSource, measure, read_chunks
from clearhead.data.stores.arrays import ArrayStore, ArrayWriter, id_dtype
from clearhead.data.stores.cache import load_or_make
from clearhead.data.stores.document_chunks import chunk_documents
from clearhead.data.stores.documents import Documents
from clearhead.errors import InputError
from clearhead.spec.describe import number_of
from clearhead.text.tokenizer import Tokenizer

# How much text is tokenized at once: enough to keep every core busy.
_BATCH_CHARACTERS = 1 << 20
_BATCH_PARTS = 20_000


class Corpus(Documents, ArrayStore):
    """Tokenized documents in a folder.

    Args:
        folder: the store's folder.
        tokenizer: what the text was tokenized with.

    Attributes:
        documents: the ids of every document.
        largest_id: the largest of them.
        text_bytes: bytes of the text in UTF-8.
    """

    contents: ClassVar[str] = "tokenized text"

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        ArrayStore.__init__(self, folder)
        Documents.__init__(self, self.ragged("document"), tokenizer)
        self.largest_id, self.text_bytes = int(self.record["largest_id"]), int(self.record["bytes"])
        self.report = f"{self.num_tokens:,} tokens in {number_of(len(self), 'document')}"


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
            raise InputError(f"{source.place(0)}: the tokenizer finds no token in the text from here on")
        writer.finish(record)

    inputs = [source.identity(), tokenizer.fingerprint, share]
    return load_or_make("corpora", inputs, lambda folder: Corpus(folder, tokenizer), make)


def _write(writer: ArrayWriter, chunks: Iterable[TextChunk], tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the ids and offsets of all documents that have a token; return the record."""
    end = length = num_bytes = 0
    largest = -1

    def counted() -> Iterator[TextChunk]:
        nonlocal num_bytes
        for chunk in chunks:
            num_bytes += len(chunk.text.encode())
            yield chunk

    offsets = [0]
    for rows, starts in encoded_parts(counted(), tokenizer):
        for row, is_new in zip(rows, starts, strict=True):
            if is_new and length:
                end += length
                offsets.append(end)
                length = 0
            length += len(row)
        flat = np.fromiter(itertools.chain.from_iterable(rows), dtype=id_dtype(tokenizer), count=sum(map(len, rows)))
        largest = max(largest, int(flat.max()) if len(flat) else -1)
        writer.append("document_ids", flat)
        writer.append("document_offsets", np.array(offsets, dtype=np.int64))
        offsets = []
    if length:
        writer.append("document_offsets", np.array([end + length], dtype=np.int64))
    return {"largest_id": largest, "bytes": num_bytes}


def encoded_parts(
    chunks: Iterable[TextChunk], tokenizer: Tokenizer
) -> Iterator[tuple[Sequence[Sequence[int]], list[bool]]]:
    """Tokenize documents in the order of the text, many parts at a time.

    Returns:
        for many parts together, the ids of each, and whether a document starts with it.
    """
    for texts, starts in _batches(chunk_documents(chunks, tokenizer)):
        yield tokenizer.encode_batch(texts), starts


def _batches(parts: Iterable[tuple[str, bool]]) -> Iterator[tuple[list[str], list[bool]]]:
    """Gather texts until there is enough to tokenize at once."""
    texts: list[str] = []
    starts: list[bool] = []
    room = _BATCH_CHARACTERS
    for text, is_new in parts:
        texts.append(text)
        starts.append(is_new)
        room -= len(text)
        if room <= 0 or len(texts) == _BATCH_PARTS:
            yield texts, starts
            texts, starts, room = [], [], _BATCH_CHARACTERS
    if texts:
        yield texts, starts
