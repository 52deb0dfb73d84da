"""A SentencePiece model with the ids that its framework gave to the pieces, run by the SentencePiece library."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.base.errors import InputError
from clearhead.base.files import read_model_file
from clearhead.text.spans import Span
from clearhead.text.tokenizer_checks import charsmap_fault, check_size

if TYPE_CHECKING:
    import sentencepiece

KIND = "sentencepiece"
# Bytes of a model; that of XLM-V has 18 million.
LARGEST_PIECES = 2**25
_SPACE = "▁"
_CODE_END = "<<"
_CODE_START = ">>"


class SentencePieceBackend:
    """A SentencePiece model with other ids than its own.

    Args:
        document: what `sentencepiece_document` returned.

    Raises:
        InputError: the model cannot be read.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        name = "the tokenizer's SentencePiece model"
        self._model = load_pieces(decode_model(document["model"], name), name)
        self._lookup: Mapping[str, int] | None = document.get("vocabulary")
        self._has_codes = bool(document.get("codes"))
        # False: the model removes spaces at the ends of a text, so that pieces there write none.
        self._keeps_spaces: bool = self._model.normalize("a ").endswith(_SPACE)
        if self._lookup is None:
            entries, self._ids = _number_pieces(self._model, document)
        else:
            entries, self._ids = dict(self._lookup), []
        self._entries = entries | document["added"]
        missing = {document["unknown"], *document["special"]} - self._entries.keys()
        if missing:
            raise InputError(f"{name}: the special token {min(missing)!r} is not in its vocabulary")
        self._unknown = self._entries[document["unknown"]]
        self._texts = {index: entry for entry, index in self._entries.items()}
        self._special = {entry: self._entries[entry] for entry in document["special"]}

    def vocabulary(self) -> dict[str, int]:
        """Return every vocabulary entry with its id."""
        return dict(self._entries)

    def added_tokens(self) -> dict[str, int]:
        """Return the special tokens, with their ids."""
        return dict(self._special)

    def special_ids(self) -> frozenset[int]:
        """Return the ids of special tokens, which no text is encoded as."""
        return frozenset(self._special.values())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts in which special tokens are plain text."""
        return [self._encode(_check_text(text)) for text in texts]

    def encode_with_special(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens are recognized."""
        longest_first = sorted(self._special, key=len, reverse=True)
        pieces = (
            re.split(f"({'|'.join(map(re.escape, longest_first))})", _check_text(text)) if longest_first else [text]
        )
        # Parts at odd places are the entries themselves.
        ids_by_piece = [
            [self._special[piece]] if number % 2 else self._encode(piece) for number, piece in enumerate(pieces)
        ]
        return [index for ids in ids_by_piece for index in ids]

    def encode_with_spans(self, text: str) -> tuple[list[int], list[Span]]:
        """Return the ids of a text, and the span of each in it."""
        code, rest = self._cut_code(_check_text(text))
        mapping = self._model.encode_as_offset_mapping(rest)
        ids = self._vocabulary_ids(mapping["ids"], mapping["pieces"])
        spans = [(start + len(code), stop + len(code)) for start, stop in mapping["offsets"]]
        return (ids, spans) if not code else ([self._code_id(code), *ids], [(0, len(code)), *spans])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special ones."""
        special = set(self._special.values())
        pieces = [self._texts[index] for index in ids if index in self._texts and index not in special]
        text: str = self._model.decode_pieces(pieces) if pieces else ""
        # Entries that are no pieces of the model keep its sign for a space.
        text = text.replace(_SPACE, " ")
        return text if self._keeps_spaces else text.strip()

    def entry(self, index: int) -> str | None:
        """Return the entry of an id, or None where there is none."""
        return self._texts.get(index)

    def _encode(self, text: str) -> list[int]:
        code, rest = self._cut_code(text)
        if self._lookup is None:
            ids = self._vocabulary_ids(self._model.encode(rest, out_type=int), ())
        else:
            ids = self._vocabulary_ids((), self._model.encode(rest, out_type=str))
        return [self._code_id(code), *ids] if code else ids

    def _vocabulary_ids(self, numbers: Sequence[int], pieces: Sequence[str]) -> list[int]:
        """Return the ids of pieces by their numbers in the model, or by their texts where there is a vocabulary."""
        if self._lookup is None:
            return [self._ids[number] for number in numbers]
        return [self._lookup.get(piece, self._unknown) for piece in pieces]

    def _cut_code(self, text: str) -> tuple[str, str]:
        """Split a text into the language code that it begins with, such as >>fra<<, and the rest."""
        end = text.find(_CODE_END) if self._has_codes and text.startswith(_CODE_START) else -1
        cut = 0 if end < 0 else end + len(_CODE_END)
        return text[:cut], text[cut:]

    def _code_id(self, code: str) -> int:
        index: int = self._entries.get(code, self._unknown)
        return index


def _check_text(text: str) -> str:
    """Return the text; raise TypeError for anything else, as the tokenizers library does."""
    if not isinstance(text, str):
        raise TypeError("not a str")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise TypeError("lone surrogate") from None
    return text


def _number_pieces(
    model: sentencepiece.SentencePieceProcessor, document: Mapping[str, Any]
) -> tuple[dict[str, int], list[int]]:
    """Return the entries with their ids, and the id of each number of the model."""
    front, skip = document["front"], document["skip"]
    shift = len(front) - skip
    entries = {entry: index for index, entry in enumerate(front)}
    unknown = document["unknown"]
    ids = []
    for number in range(model.get_piece_size()):
        piece = model.id_to_piece(number)
        if number < skip:
            # Replaced pieces keep their meaning by name; those without one are never encoded.
            ids.append(entries.get(unknown if model.is_unknown(number) else piece, 0))
            continue
        entries.setdefault(piece, number + shift)
        ids.append(entries[unknown] if model.is_unknown(number) and unknown in entries else number + shift)
    return entries, ids


def load_pieces(content: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    """Return the model that a file holds.

    Args:
        content: the file's bytes.
        name: what a message calls it.

    Raises:
        InputError: it is no SentencePiece model, or a very large one.
    """
    import sentencepiece

    if len(content) > LARGEST_PIECES:
        raise InputError(
            f"{name}: {len(content)} bytes are too many for a SentencePiece model ({LARGEST_PIECES} at most)"
        )
    try:
        # The library takes no bytes for no model, and fails at the first text.
        if not content:
            raise ValueError("no bytes")
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
    except (RuntimeError, ValueError):
        raise InputError(f"{name}: expected a SentencePiece model, but it cannot be read as one") from None
    check_size(model.get_piece_size(), name, "pieces")
    return model


def read_pieces(path: Path) -> bytes:
    """Return the bytes of a SentencePiece model.

    Raises:
        InputError: the file is missing or is no such model.
    """
    content = read_model_file(path, what="a SentencePiece model", largest=LARGEST_PIECES)
    check_tables(content, str(path))
    load_pieces(content, str(path))
    return content


def check_tables(content: bytes, name: str) -> None:
    """Refuse a SentencePiece model whose tables of replacements are damaged: the library follows their links unchecked.

    Args:
        content: the model.
        name: what a message calls it.

    Raises:
        InputError: a table is damaged.
    """
    for table in _replacement_tables(content):
        if (fault := charsmap_fault(table)) is not None:
            raise InputError(f"{name}: {fault}")


def decode_model(text: str, name: str) -> bytes:
    """Return the bytes of a model that a document holds in base64.

    Raises:
        InputError: it is not base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"{name}: expected a SentencePiece model in base64") from None


def _replacement_tables(content: bytes) -> Iterator[bytes]:
    """Yield the compiled tables of replacements of a model, which are in its normalizer and its denormalizer.

    Source: the fields of ModelProto and NormalizerSpec, github.com/google/sentencepiece, sentencepiece_model.proto.
    """
    for number, spec in _fields(content):
        if number in (3, 5):
            yield from (table for field, table in _fields(spec) if field == 2 and table)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the fields of a protocol buffer that hold bytes, with their numbers; a damaged one ends early."""
    offset = 0
    while offset < len(message):
        # Most fields are pieces: number 1, and shorter than 128 bytes.
        while message[offset : offset + 1] == b"\n" and offset + 1 < len(message) and message[offset + 1] < 128:
            if (offset := offset + 2 + message[offset + 1]) >= len(message):
                return
        key, offset = _varint(message, offset)
        kind = key & 7
        if kind == 2:
            length, offset = _varint(message, offset)
            yield key >> 3, message[offset : offset + length]
            offset += length
        elif kind == 0:
            _, offset = _varint(message, offset)
        else:
            offset += {1: 8, 5: 4}.get(kind, len(message))


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        if offset >= len(message):
            break
        byte, offset = message[offset], offset + 1
        number |= (byte & 127) << shift
        if byte < 128:
            break
    return number, offset


def sentencepiece_document(
    content: bytes, *, added: Mapping[str, int], special: Sequence[str], unknown: str, **numbering: Any
) -> dict[str, Any]:
    """Return the document of a tokenizer that runs a SentencePiece model.

    Args:
        content: the model.
        added: entries that the model does not have, with their ids.
        special: entries that no text is encoded as.
        unknown: the entry of text outside the vocabulary.
        numbering: how pieces get their ids. By their numbers in the model: `front`, the entries of the first ids, which
            replace the first `skip` pieces. By a vocabulary: `vocabulary`, the ids of pieces, and `codes`, whether a
            text may begin with a language code such as >>fra<<, which is one entry.
    """
    model = base64.b64encode(content).decode("ascii")
    tokens = {"added": dict(added), "special": list(special), "unknown": unknown}
    return {"type": KIND, "model": model, **numbering, **tokens}
