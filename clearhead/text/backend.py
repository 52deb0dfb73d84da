"""Tokenizer backends: the tokenizers library for a `tokenizer.json`, or the SentencePiece library."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

import tokenizers

from clearhead.base.errors import InputError
from clearhead.text.sentencepiece import KIND, SentencePieceBackend
from clearhead.text.spans import Span

# Normalizers that change each character alone, or together with its combining marks.
_BY_CHARACTER: Final = {None, "BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents"}
_AT_SPACES: Final = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
_WORDS_AT_ONCE: Final = 64


class DocumentBackend:
    """Backend that runs a `tokenizer.json` with the tokenizers library.

    Args:
        document: parsed content of the file.

    Raises:
        InputError: the library cannot run the document.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self._backend = _load_backend(document)
        # "</s>" in a text of the user is four characters, not the end token.
        self._backend.encode_special_tokens = True
        self._has_words = _has_words(document)

    @cached_property
    def _parsing(self) -> tokenizers.Tokenizer:
        """Second tokenizer for the same document, which recognizes special tokens in a text."""
        return _load_backend(self._document)

    @cached_property
    def _entries(self) -> Mapping[str, int]:
        with _library():
            return MappingProxyType(self._backend.get_vocab(with_added_tokens=True))

    def vocabulary(self) -> Mapping[str, int]:
        """Return every vocabulary entry with its id."""
        return self._entries

    def added_tokens(self) -> dict[str, int]:
        """Return the added tokens (special and other ones) with their ids."""
        return {token.content: index for index, token in self._backend.get_added_tokens_decoder().items()}

    def special_ids(self) -> frozenset[int]:
        """Return the ids of special tokens."""
        return frozenset(index for index, token in self._backend.get_added_tokens_decoder().items() if token.special)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts; special tokens in them count as plain text.

        Raises:
            TypeError: a text is not Unicode text.
        """
        if self._has_words:
            rows = [str.split(text, " ") for text in texts]
            ids_of: dict[str, list[int]] = {word: [] for word in chain.from_iterable(rows)}
            # A word alone takes more time than a word within a text.
            if 2 * len(ids_of) < sum(map(len, rows)):
                self._encode_words(ids_of)
                return [list(chain.from_iterable(map(ids_of.__getitem__, row))) for row in rows]
        with _library():
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _encode_words(self, ids_of: Mapping[str, list[int]]) -> None:
        """Tokenize the words that are the keys of `ids_of`, and append the ids of each word to its list."""
        words = list(ids_of)
        groups = [words[start : start + _WORDS_AT_ONCE] for start in range(0, len(words), _WORDS_AT_ONCE)]
        with _library():
            encodings = self._backend.encode_batch(groups, is_pretokenized=True, add_special_tokens=False)
        for group, encoding in zip(groups, encodings, strict=True):
            word_numbers: Sequence[Any] = encoding.word_ids
            for index, word_number in zip(encoding.ids, word_numbers, strict=True):
                ids_of[group[word_number]].append(index)

    def encode_with_special(self, text: str) -> list[int]:
        """Encode a text in which special tokens are recognized."""
        with _library():
            ids: list[int] = self._parsing.encode(text, add_special_tokens=False).ids
        return ids

    def encode_with_spans(self, text: str) -> tuple[list[int], list[Span]]:
        """Encode a text; return its ids and the span of each id in the text."""
        with _library():
            encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def word_numbers(self, text: str) -> list[int | None]:
        """Return the number of the word of each id of a text, as the pre-tokenizer splits it; None outside words."""
        with _library():
            numbers: list[int | None] = self._backend.encode(text, add_special_tokens=False).word_ids
        return numbers

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to a text, without special tokens."""
        with _library():
            text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def entry(self, index: int) -> str | None:
        """Return the vocabulary entry of an id, or None if there is none."""
        token: str | None = self._backend.id_to_token(index) if index >= 0 else None
        return token


def _has_words(document: Mapping[str, Any]) -> bool:
    """Return whether the words between the spaces of a text can be tokenized independently of each other."""
    splits, normalizer = document.get("pre_tokenizer") or {}, document.get("normalizer") or {}
    is_split = splits.get("type") in _AT_SPACES and normalizer.get("type") in _BY_CHARACTER
    # Added tokens that are not special may contain spaces.
    is_special = all(token.get("special") for token in document.get("added_tokens") or [])
    return is_split and is_special and document["model"].get("type") in ("WordPiece", "WordLevel")


def _load_backend(document: Mapping[str, Any]) -> tokenizers.Tokenizer:
    with _library():
        backend = tokenizers.Tokenizer.from_str(json.dumps(document))
        backend.no_truncation()
        backend.no_padding()
    return backend


@contextlib.contextmanager
def _library() -> Iterator[None]:
    """Convert errors of the tokenizers library, panics included, to `InputError`.

    Raises:
        TypeError: a text is not a str; passed on unchanged.
        InputError: the library cannot run the document, or fails on this text.
    """
    try:
        yield
    except (TypeError, InputError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        # A panic of the Rust library derives from BaseException, not from Exception.
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        raise InputError(f"the tokenizers library cannot run this tokenizer.json: {str(error)[:300]}") from None


Backend = DocumentBackend | SentencePieceBackend
"""Backend of a tokenizer: encodes and decodes, without adding special tokens."""
_latest: list[tuple[Mapping[str, Any], Backend]] = []


def backend_of(document: Mapping[str, Any]) -> Backend:
    """Return the backend of a document, which must not change afterwards; the latest backend is cached.

    Raises:
        InputError: no backend can run the document.
    """
    # Loading a tokenizer needs its backend several times, and a large vocabulary takes half a second to load.
    for known, backend in tuple(_latest):
        if known is document:
            return backend
    fresh = SentencePieceBackend(document) if document.get("type") == KIND else DocumentBackend(document)
    _latest[:] = [(document, fresh)]
    return fresh
