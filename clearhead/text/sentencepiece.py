"""SentencePiece backend: runs a SentencePiece model, with the token ids of a framework such as fairseq."""

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
# Most bytes of a model; the model of XLM-V has 18 million.
LARGEST_PIECES = 2**25
_SPACE = "▁"
_CODE_END = "<<"
_CODE_START = ">>"


class SentencePieceBackend:
    """Backend that runs a SentencePiece model and maps its pieces to the token ids of the model's framework.

    Args:
        document: document from `sentencepiece_document`.

    Raises:
        InputError: the model cannot be read.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        name = "the tokenizer's SentencePiece model"
        self._model = load_pieces(decode_model(document["model"], name), name)
        self._lookup: Mapping[str, int] | None = document.get("vocabulary")
        self._has_codes = bool(document.get("codes"))
        # If False, the model removes spaces at both ends of a text, so decoding strips them too.
        self._keeps_spaces: bool = self._model.normalize("a ").endswith(_SPACE)
        if self._lookup is None:
            entries, self._ids = _number_pieces(self._model, document)
        else:
            entries, self._ids = dict(self._lookup), []
        self._entries = entries | document["added"]
        missing = {document["unknown"], *document["special"]} - self._entries.keys()
        if missing:
            raise InputError(f"{name}: the special token {min(missing)!r} is not in its vocabulary: restore the file")
        self._unknown = self._entries[document["unknown"]]
        self._texts = {index: entry for entry, index in self._entries.items()}
        self._special = {entry: self._entries[entry] for entry in document["special"]}

    def vocabulary(self) -> dict[str, int]:
        """Return every vocabulary entry with its id."""
        return dict(self._entries)

    def added_tokens(self) -> dict[str, int]:
        """Return the special tokens with their ids."""
        return dict(self._special)

    def special_ids(self) -> frozenset[int]:
        """Return the ids of special tokens."""
        return frozenset(self._special.values())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts; special tokens in them count as plain text."""
        return [self._encode(_check_text(text)) for text in texts]

    def encode_with_special(self, text: str) -> list[int]:
        """Encode a text in which special tokens are recognized."""
        longest_first = sorted(self._special, key=len, reverse=True)
        pieces = (
            re.split(f"({'|'.join(map(re.escape, longest_first))})", _check_text(text)) if longest_first else [text]
        )
        # `re.split` with a group returns the special tokens at odd indices.
        ids_by_piece = [
            [self._special[piece]] if number % 2 else self._encode(piece) for number, piece in enumerate(pieces)
        ]
        return [index for ids in ids_by_piece for index in ids]

    def encode_with_spans(self, text: str) -> tuple[list[int], list[Span]]:
        """Encode a text; return its ids and the span of each id in the text."""
        code, rest = self._cut_code(_check_text(text))
        mapping = self._model.encode_as_offset_mapping(rest)
        ids = self._vocabulary_ids(mapping["ids"], mapping["pieces"])
        spans = [(start + len(code), stop + len(code)) for start, stop in mapping["offsets"]]
        return (ids, spans) if not code else ([self._code_id(code), *ids], [(0, len(code)), *spans])

    def word_numbers(self, text: str) -> list[int | None]:
        """Return None for each id of a text: a SentencePiece model splits no words."""
        return [None] * len(self._encode(_check_text(text)))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to a text, without special tokens."""
        special = set(self._special.values())
        pieces = [self._texts[index] for index in ids if index in self._texts and index not in special]
        text: str = self._model.decode_pieces(pieces) if pieces else ""
        # Entries outside the model keep the SentencePiece sign for a space.
        text = text.replace(_SPACE, " ")
        return text if self._keeps_spaces else text.strip()

    def entry(self, index: int) -> str | None:
        """Return the vocabulary entry of an id, or None if there is none."""
        return self._texts.get(index)

    def _encode(self, text: str) -> list[int]:
        code, rest = self._cut_code(text)
        if self._lookup is None:
            ids = self._vocabulary_ids(self._model.encode(rest, out_type=int), ())
        else:
            ids = self._vocabulary_ids((), self._model.encode(rest, out_type=str))
        return [self._code_id(code), *ids] if code else ids

    def _vocabulary_ids(self, numbers: Sequence[int], pieces: Sequence[str]) -> list[int]:
        """Return the ids of pieces: looked up by text if there is a separate vocabulary, otherwise by piece number."""
        if self._lookup is None:
            return [self._ids[number] for number in numbers]
        return [self._lookup.get(piece, self._unknown) for piece in pieces]

    def _cut_code(self, text: str) -> tuple[str, str]:
        """Split a text into the language code at its start, such as >>fra<< (may be empty), and the rest."""
        end = text.find(_CODE_END) if self._has_codes and text.startswith(_CODE_START) else -1
        cut = 0 if end < 0 else end + len(_CODE_END)
        return text[:cut], text[cut:]

    def _code_id(self, code: str) -> int:
        index: int = self._entries.get(code, self._unknown)
        return index


def _check_text(text: str) -> str:
    """Return a text unchanged; raise TypeError unless it is Unicode text, as the tokenizers library does."""
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
    """Return the id of each vocabulary entry, and a list with the id of each piece, by its number in the model."""
    front, skip = document["front"], document["skip"]
    shift = len(front) - skip
    entries = {entry: index for index, entry in enumerate(front)}
    unknown = document["unknown"]
    ids = []
    for number in range(model.get_piece_size()):
        piece = model.id_to_piece(number)
        if number < skip:
            # A replaced piece gets the id of the entry with its name; a piece without such an entry is never encoded.
            ids.append(entries.get(unknown if model.is_unknown(number) else piece, 0))
            continue
        entries.setdefault(piece, number + shift)
        ids.append(entries[unknown] if model.is_unknown(number) and unknown in entries else number + shift)
    return entries, ids


def load_pieces(content: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    """Load a SentencePiece model from bytes.

    Args:
        content: bytes of the model.
        name: name of the model in messages.

    Raises:
        InputError: the bytes are no SentencePiece model, or too many.
    """
    import sentencepiece

    if len(content) > LARGEST_PIECES:
        raise InputError(
            f"{name}: {len(content)} bytes are too many for a SentencePiece model; expected at most {LARGEST_PIECES}"
        )
    try:
        # The library accepts empty bytes, and fails only at the first text.
        if not content:
            raise ValueError("no bytes")
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
    except (RuntimeError, ValueError):
        raise InputError(f"{name}: the file must be a SentencePiece model, but the library cannot read it") from None
    check_size(model.get_piece_size(), name, "pieces")
    return model


def read_pieces(path: Path) -> bytes:
    """Read and check a SentencePiece model, and return its bytes.

    Raises:
        InputError: the file is missing or is no SentencePiece model.
    """
    content = read_model_file(path, what="a SentencePiece model", largest=LARGEST_PIECES)
    check_tables(content, str(path))
    load_pieces(content, str(path))
    return content


def check_tables(content: bytes, name: str) -> None:
    """Refuse a SentencePiece model with damaged replacement tables, whose links the library follows unchecked.

    Args:
        content: bytes of the model.
        name: name of the model in messages.

    Raises:
        InputError: a table is damaged.
    """
    for table in _replacement_tables(content):
        if (fault := charsmap_fault(table)) is not None:
            raise InputError(f"{name}: {fault}")


def decode_model(text: str, name: str) -> bytes:
    """Decode a model from base64 to bytes.

    Raises:
        InputError: the text is not base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"{name}: the model must be base64: restore the file") from None


def _replacement_tables(content: bytes) -> Iterator[bytes]:
    """Yield the compiled replacement tables of a SentencePiece model, from its normalizer and its denormalizer.

    Source: the fields of ModelProto and NormalizerSpec, github.com/google/sentencepiece, sentencepiece_model.proto.
    """
    for number, spec in _fields(content):
        if number in (3, 5):
            yield from (table for field, table in _fields(spec) if field == 2 and table)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the numbers and contents of the byte fields of a protocol buffer; a damaged message ends early."""
    offset = 0
    while offset < len(message):
        # Skip pieces fast: most fields have number 1 and fewer than 128 bytes.
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
        content: bytes of the model.
        added: entries that the model does not have, with their ids.
        special: special tokens, which are recognized only by `encode_with_special`.
        unknown: unknown token, for text outside the vocabulary.
        numbering: mapping from pieces to ids, in one of two forms. With `front` and `skip`, ids follow the piece
            numbers, and the entries of `front` replace the first `skip` pieces. With `vocabulary`, this dictionary
            has the ids. Then `codes` is True if a text may begin with a language code, such as the entry >>fra<<.
    """
    model = base64.b64encode(content).decode("ascii")
    tokens = {"added": dict(added), "special": list(special), "unknown": unknown}
    return {"type": KIND, "model": model, **numbering, **tokens}
