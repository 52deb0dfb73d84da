"""Plain text as ids, made once in a stream and mapped into memory: neither text nor ids need fit there."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from clearhead.data.sources.texts import WHOLE, Share, TextChunk, TextSize, TextSource, measure, read_chunks
from clearhead.data.stores.arrays import Ragged, Rows, atomic_folder, discard_folder
from clearhead.data.stores.cache import Progress, cache_folder
from clearhead.data.stores.document_chunks import chunk_documents
from clearhead.errors import InputError
from clearhead.text.special_tokens import PrefixSuffix, SpecialTokens
from clearhead.text.tokenizer import Tokenizer

_IDS, _OFFSETS, _RECORD = "ids.bin", "offsets.bin", "corpus.json"
_OFFSET_TYPE = np.dtype("<i8")
# How much text is tokenised at once: enough to keep every core busy.
_BATCH_CHARACTERS = 1 << 20
_BATCH_PARTS = 20_000


@dataclass(frozen=True)
class TextSpecial:
    """The ids that batches add to a text: padding, start, end, and the mask where the vocabulary has one.

    Args:
        pad, bos, eos, mask: the ids with these roles.
        frame: what stands around texts; None: a start and an end token.
    """

    pad: int
    bos: int
    eos: int
    mask: int | None
    frame: SpecialTokens | None = None

    @property
    def alone(self) -> PrefixSuffix:
        """What stands around a text that is read."""
        return PrefixSuffix((self.bos,), (self.eos,)) if self.frame is None else self.frame.for_text

    @property
    def said(self) -> PrefixSuffix:
        """What stands around a text that is said token by token."""
        return PrefixSuffix((self.bos,), (self.eos,)) if self.frame is None else self.frame.for_target

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TextSpecial:
        """Return the ids that a tokenizer adds."""
        frame = tokenizer.special_tokens if tokenizer.has_own_special_tokens else None
        return cls(tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id, frame)

    def to_json(self) -> dict[str, Any]:
        """Return the ids as JSON values; a frame that follows from the roles is left out."""
        roles = {"pad": self.pad, "bos": self.bos, "eos": self.eos, "mask": self.mask}
        return roles if self.frame is None else {**roles, "frame": self.frame.to_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TextSpecial:
        """Read what `to_json` returned."""
        frame = {"frame": SpecialTokens.from_json(content["frame"])} if "frame" in content else {}
        return cls(**{**content, **frame})


class Corpus:
    """Documents as ids in a folder, mapped into memory.

    A document is kept as its plain ids; its sequence is these ids with what its tokenizer puts around what is said:
    a start and an end token.

    Args:
        folder: what `prepare_corpus` wrote.

    Attributes:
        documents: the plain ids of every document.
        special: the ids that batches add.
        identity: a hash of all ids; a checkpoint remembers it.
        num_tokens: plain ids in all documents together.
        largest_id: the largest of them.
        text_characters: characters of the text.
        text_bytes: bytes of the text in UTF-8.

    Raises:
        InputError: the folder does not hold a whole corpus.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
            self.special = TextSpecial.from_json(record["special"])
            self.identity = str(record["identity"])
            self.largest_id = int(record["largest_id"])
            self.text_characters, self.text_bytes = int(record["characters"]), int(record["bytes"])
            ids = np.memmap(folder / _IDS, dtype=np.dtype(record["dtype"]), mode="r").view(ndarray)
            offsets = np.memmap(folder / _OFFSETS, dtype=_OFFSET_TYPE, mode="r").view(ndarray)
            whole = len(ids) == record["tokens"] == offsets[-1] and len(offsets) == record["documents"] + 1
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise InputError(
                f"{folder}: not a whole store of tokenised text ({error}); prepare the data again"
            ) from None
        if not whole:
            raise InputError(f"{folder}: the parts of the store do not fit each other; prepare the data again")
        self.documents = Ragged(ids, offsets)

    def __len__(self) -> int:
        return len(self.documents.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """The number of plain ids in all documents together."""
        return len(self.documents.ids)

    def sequence(self, document: int, start: int, stop: int) -> Int64[ndarray, " _"]:
        """Return a stretch of a document's sequence.

        Args:
            document: the number of the document.
            start: where the stretch begins; 0 is the first id of what stands in front of the document.
            stop: where it ends.
        """
        around = self.special.said
        ids = self.documents[document]
        front, last = len(around.prefix), len(around.prefix) + len(ids)
        assert 0 <= start < stop <= last + len(around.suffix), "a stretch of a sequence lies within it"
        parts = (
            around.prefix[start:stop],
            ids[max(start - front, 0) : max(stop - front, 0)],
            around.suffix[max(start - last, 0) : max(stop - last, 0)],
        )
        return np.concatenate(parts).astype(np.int64)

    @property
    def read_lengths(self) -> Rows:
        """How many ids of each document's sequence are read: all but the last, which is only said."""
        return self.documents.lengths + len(self.special.said) - 1


def prepare_corpus(
    source: TextSource, tokenizer: Tokenizer, *, share: Share = WHOLE, progress: Progress | None = None
) -> Corpus:
    """Tokenise a text, or open what an earlier run made of the same content.

    Args:
        source: where the text comes from.
        tokenizer: what turns it into ids.
        share: where the part to take begins and ends, each from 0 to 1: by characters where the source is one
            document, else by documents.
        progress: called with characters done and characters in all, of the whole source, as the work goes on.

    Raises:
        InputError: the source is unusable, or the share has no text in it.
        RunFailure: the cache cannot be written.
    """
    folder = cache_folder("corpora", source.identity(), tokenizer.fingerprint, share)
    if folder.is_dir():
        try:
            return Corpus(folder)
        except InputError:
            discard_folder(folder)
    size = measure(source)
    with atomic_folder(folder) as temporary:
        writer = _Writer(tokenizer, size, progress)
        with (temporary / _IDS).open("wb") as ids, (temporary / _OFFSETS).open("wb") as offsets:
            writer.write(read_chunks(source, share, size), ids, offsets)
        if not writer.tokens:
            raise InputError(f"{source.place(0)}: the tokenizer finds no token in the text from here on")
        (temporary / _RECORD).write_text(json.dumps(writer.record()), encoding="utf-8")
    return Corpus(folder)


class _Writer:
    """Turns stretches of text into the files of a corpus, holding only a part of the text at any time."""

    def __init__(self, tokenizer: Tokenizer, size: TextSize, progress: Progress | None) -> None:
        self.tokenizer, self.size, self.progress = tokenizer, size, progress
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<i4")
        self.tokens = self.documents = self.characters = self.bytes = self.largest = 0
        self.hashes = (hashlib.sha256(), hashlib.sha256())

    def write(self, stretches: Iterable[TextChunk], ids: BinaryIO, offsets: BinaryIO) -> None:
        """Write all ids, and where each document starts; a document without any id is left out."""
        ends = [0]
        length = 0
        for texts, starts in _batches(chunk_documents(self._counted(stretches), self.tokenizer)):
            rows = self.tokenizer.encode_batch(texts)
            for row, is_new in zip(rows, starts, strict=True):
                if is_new and length:
                    ends.append(ends[-1] + length)
                    length = 0
                length += len(row)
            flat = np.fromiter(itertools.chain.from_iterable(rows), dtype=self.dtype, count=sum(map(len, rows)))
            self.tokens += len(flat)
            self.largest = max(self.largest, int(flat.max(initial=0)))
            self._append(ids, 0, flat)
            self._append(offsets, 1, np.array(ends[:-1], dtype=_OFFSET_TYPE))
            self.documents += len(ends) - 1
            ends = ends[-1:]
            if self.progress is not None:
                self.progress(self.characters, self.size.characters)
        last = [ends[-1], ends[-1] + length] if length else ends
        self.documents += len(last) - 1
        self._append(offsets, 1, np.array(last, dtype=_OFFSET_TYPE))

    def _counted(self, stretches: Iterable[TextChunk]) -> Iterator[TextChunk]:
        for stretch in stretches:
            self.characters += len(stretch.text)
            self.bytes += len(stretch.text.encode())
            yield stretch

    def _append(self, file: BinaryIO, which: int, array: ndarray) -> None:
        content = array.tobytes()
        self.hashes[which].update(content)
        file.write(content)

    def record(self) -> dict[str, Any]:
        """Return what the corpus says of itself."""
        digests = [self.dtype.str, *(each.hexdigest() for each in self.hashes)]
        return {
            "dtype": self.dtype.str,
            "tokens": self.tokens,
            "documents": self.documents,
            "largest_id": self.largest,
            "characters": self.characters,
            "bytes": self.bytes,
            "special": TextSpecial.of(self.tokenizer).to_json(),
            "identity": hashlib.sha256(" ".join(digests).encode()).hexdigest(),
        }


def _batches(parts: Iterable[tuple[str, bool]]) -> Iterator[tuple[list[str], list[bool]]]:
    """Gather texts until there is enough to tokenise at once."""
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


def bits_per_byte(loss: float, corpus: Corpus) -> float:
    """Return how many bits a model spends on each byte of the text.

    Args:
        loss: the sum over all predicted tokens of the corpus, in nats.
        corpus: the text.
    """
    return loss / math.log(2) / corpus.text_bytes
