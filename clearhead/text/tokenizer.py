"""`Tokenizer`: encodes and decodes texts of one side; has token roles, a kind and a fingerprint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxtyping import Int64
from numpy import ndarray

from clearhead.base.errors import InputError, nth_text
from clearhead.base.files import write_json
from clearhead.base.printing import Printed
from clearhead.text.added_tokens import needed_entries, with_entries, with_words
from clearhead.text.backend import backend_of
from clearhead.text.spans import Span, trim_spans, word_numbers
from clearhead.text.special_tokens import SpecialTokens
from clearhead.text.token_roles import TokenRoles, find_roles
from clearhead.text.tokenizer_files import read_files

_JOINT = "@@"
# Characters that one call of the library tokenizes.
_CHARACTERS = 500_000
_MARKER, _MARKED = "▁", ("bpe", "unigram")
_UNKNOWN_WORD = re.compile("m(?=u+[ms])")
_JOINED = re.compile(rf"{_JOINT}(?: |$)")


class Tokenizer(Printed):
    """Encodes texts to ids and decodes ids to texts; equal fingerprints mean equal ids for every text.

    Args:
        document: parsed content of a `tokenizer.json`, or a SentencePiece model with its ids.
        kind: kind of training, such as "bpe", or "pretrained" if unknown.
        roles: ids of the tokens with a role.
        special_tokens: special tokens around a text. None means a start and an end token.

    Raises:
        InputError: the document cannot be run.
    """

    def __init__(
        self, document: Mapping[str, Any], *, kind: str, roles: TokenRoles, special_tokens: SpecialTokens | None = None
    ) -> None:
        self.kind = kind
        self.roles = roles
        self.special_tokens: SpecialTokens = (
            SpecialTokens.from_bos_eos(roles.bos, roles.eos) if special_tokens is None else special_tokens
        )
        self._own_special_tokens = special_tokens
        self._document = document
        self._backend = backend_of(document)
        vocabulary = self._backend.vocabulary()
        # A vocabulary can have unused ids, so its size follows from the largest id.
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self._reserved = self._backend.special_ids() - {roles.unk}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that determines the ids of a text."""
        return _fingerprint(self._document, self.kind, self.roles, self._own_special_tokens)

    def _fields_to_print(self) -> Mapping[str, object]:
        """Return the attributes that `repr` shows."""
        return {"kind": self.kind, "vocab_size": self.vocab_size, "roles": self.roles}

    @property
    def pad_id(self) -> int:
        """The id of the padding token."""
        return self.roles.pad

    @property
    def unk_id(self) -> int:
        """The id of unknown text; the padding id if every text can be encoded."""
        return self.roles.pad if self.roles.unk is None else self.roles.unk

    @property
    def bos_id(self) -> int:
        """The id of the token that starts the input of a decoder."""
        return self.roles.bos

    @property
    def eos_id(self) -> int:
        """The id of the token that ends a sequence."""
        return self.roles.eos

    @property
    def mask_id(self) -> int | None:
        """The id of the mask token; None if the vocabulary has none."""
        return self.roles.mask

    @property
    def sentinel_ids(self) -> tuple[int, ...]:
        """The ids of the sentinel tokens for masked spans, in order; empty if the vocabulary has none."""
        return self.roles.sentinels

    def encode(self, text: str) -> list[int]:
        """Encode one text, without adding special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts, without adding special tokens; special tokens written in a text count as plain text.

        Args:
            texts: texts to encode, each a str without lone surrogates.

        Raises:
            InputError: a text is not a str, or has a lone surrogate.
        """
        try:
            encoded = [ids for batch in _split_batches(texts) for ids in self._backend.encode_batch(batch)]
        except TypeError:
            raise InputError(_untokenizable(texts)) from None
        return [self._replace_reserved(ids) for ids in encoded]

    def encode_with_special(self, text: str) -> list[int]:
        """Encode a text in which special tokens are recognized, such as a rendered chat.

        Raises:
            InputError: the text is not a str, or has a lone surrogate.
        """
        try:
            return self._backend.encode_with_special(text)
        except TypeError:
            raise InputError(_untokenizable([text])) from None

    def encode_with_spans(self, text: str) -> tuple[list[int], list[Span]]:
        """Encode a text; return the ids of `encode` and the span of characters of each id.

        Spans exclude white space at both ends, unless a token is only white space. A token with part of a character
        has the whole character. A token that only marks the start of a word has the first character of the word.
        Characters that the tokenizer drops, such as white space, are in no span.

        Args:
            text: text to encode, a str without lone surrogates.

        Returns:
            The ids, and the start and end (exclusive) of each span in characters.

        Raises:
            InputError: the text is not a str, or has a lone surrogate.
        """
        try:
            ids, spans = self._backend.encode_with_spans(text)
        except TypeError:
            raise InputError(_untokenizable([text])) from None
        if self.roles.unk is None and not self._reserved.isdisjoint(ids):
            spans = [span for index, span in zip(ids, spans, strict=True) if index not in self._reserved]
        return self._replace_reserved(ids), trim_spans(text, spans)

    def split_words(self, text: str) -> list[int | None]:
        """Return the number of the word of each id of `encode`, as the tokenizer splits the text before its pieces.

        Punctuation may be a word. None means that the tokenizer does not assign the id to a word.

        Args:
            text: text to encode, a str without lone surrogates.
        """
        numbers = self._backend.word_numbers(text)
        if self.roles.unk is None and self._reserved:
            ids = self._backend.encode_with_spans(text)[0]
            numbers = [number for index, number in zip(ids, numbers, strict=True) if index not in self._reserved]
        return numbers

    def words(self, text: str) -> tuple[list[int], Int64[ndarray, " tokens"]]:
        """Encode a text; return the ids of `encode` and the word number of each id, from 0.

        Words are separated by white space; in segmented text, "@@ " joins a word to the next one. A token of only white
        space belongs to the next word.

        Args:
            text: text to encode, a str without lone surrogates.

        Raises:
            InputError: the text is not a str, or has a lone surrogate.
        """
        ids, spans = self.encode_with_spans(text)
        return ids, word_numbers(text, spans, joint=_JOINT if self.kind == "split" else None)

    def _replace_reserved(self, ids: list[int]) -> list[int]:
        """Replace ids of special tokens by the unknown id, or drop them: a text may contain an entry such as "</s>"."""
        if self._reserved.isdisjoint(ids):
            return ids
        if self.roles.unk is None:
            return [index for index in ids if index not in self._reserved]
        return [self.roles.unk if index in self._reserved else index for index in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to a text; skips special ids, and removes "@@ " in segmented text."""
        ids = list(ids)
        if self.kind in _MARKED and self.roles.unk in ids:
            ids = self._without_unknown_words(ids)
        text = self._backend.decode(ids)
        return _JOINED.sub("", text) if self.kind == "split" else text

    def _without_unknown_words(self, ids: Sequence[int]) -> list[int]:
        """Drop the word marker of words with only unknown characters, to avoid double spaces."""
        entries = [self._backend.entry(index) or "?" for index in ids]
        names = {_MARKER: "m", self._token(self.roles.unk or 0): "u"}
        # One letter per id: "m" marker, "u" unknown, "s" an entry that starts with the marker, "o" other.
        signs = "".join(names.get(entry) or "so"[entry[0] != _MARKER] for entry in entries)
        dropped = {match.start() for match in _UNKNOWN_WORD.finditer(signs)}
        return [index for number, index in enumerate(ids) if number not in dropped]

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the vocabulary entry of each id, special tokens included.

        Raises:
            InputError: an id is outside the vocabulary.
        """
        return [self._token(index) for index in ids]

    def entries(self) -> list[str]:
        """Return all vocabulary entries in the order of ids; empty for unused ids."""
        return [self._backend.entry(index) or "" for index in range(self.vocab_size)]

    def _token(self, index: int) -> str:
        token = self._backend.entry(index)
        if token is None:
            raise InputError(f"token id {index} is not in the vocabulary, expected 0 to {self.vocab_size - 1}")
        return token

    @property
    def has_own_special_tokens(self) -> bool:
        """Return whether the special tokens came with the tokenizer (otherwise its start and end token are used)."""
        return self._own_special_tokens is not None

    def with_special_tokens(self, special_tokens: SpecialTokens) -> Tokenizer:
        """Return a copy with other special tokens around texts."""
        return Tokenizer(self._document, kind=self.kind, roles=self.roles, special_tokens=special_tokens)

    def with_words(self, words: Sequence[str]) -> Tokenizer:
        """Return a copy of the tokenizer with new words, each with one id after all existing ids.

        Raises:
            InputError: a word exists already, or the tokenizer cannot learn words.
        """
        return Tokenizer(
            with_words(self._document, words), kind=self.kind, roles=self.roles, special_tokens=self._own_special_tokens
        )

    def with_entries(self, keep: Sequence[int]) -> Tokenizer:
        """Return a copy of the tokenizer with only the vocabulary entries `keep`; the index in `keep` is the new id.

        Raises:
            InputError: an entry with a role would get another id, or the tokenizer needs an entry that is left out.
        """
        for index in sorted(self._fixed_ids()):
            if index >= len(keep) or keep[index] != index:
                raise InputError(
                    f"'{self._token(index)}' has a role and must keep its id {index}: keep all ids up to it"
                )
        return Tokenizer(
            with_entries(self._document, keep),
            kind=self.kind,
            roles=self.roles,
            special_tokens=self._own_special_tokens,
        )

    def needed_ids(self, texts: Sequence[str]) -> list[int]:
        """Return, in order, the ids that a smaller vocabulary must keep: ids in the encoded texts, and special ids.

        Raises:
            InputError: no entry of the tokenizer can be left out.
        """
        last = max(self._fixed_ids())
        used = {index for ids in self.encode_batch(texts) for index in ids}
        return sorted(needed_entries(self._document, used | set(range(last + 1))))

    def _fixed_ids(self) -> set[int]:
        """Return the ids of tokens with a role and of special tokens."""
        roles = self.roles
        named = {roles.pad, roles.unk, roles.bos, roles.eos, roles.mask, *roles.sentinels, *self._backend.special_ids()}
        return {index for index in named if index is not None}

    def save(self, path: Path) -> None:
        """Write `tokenizer.json`, and `tokenizer_config.json` with kind, roles and fingerprint next to it.

        Args:
            path: file to write, such as run/tokenizer.json; a missing folder is created.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": self._token(self.roles.pad),
            "unk_token": None if self.roles.unk is None else self._token(self.roles.unk),
            "bos_token": self._token(self.roles.bos),
            "eos_token": self._token(self.roles.eos),
            "clearhead": {"kind": self.kind, "fingerprint": self.fingerprint},
        }
        if self.roles.mask is not None:
            config["mask_token"] = self._token(self.roles.mask)
        if self.roles.sentinels:
            config["additional_special_tokens"] = self.tokens(self.roles.sentinels)
        if self._own_special_tokens is not None:
            config["clearhead"]["special_tokens"] = self._own_special_tokens.to_json()
            config["clearhead"]["roles"] = asdict(self.roles)
        write_json(path, self._document)
        write_json(_config_path(path), config)

    @classmethod
    def load(cls, path: Path, *, roles: Mapping[str, str] | None = None) -> Tokenizer:
        """Load a tokenizer that `save` wrote, or that of a Hugging Face checkpoint without its class's special tokens.

        Args:
            path: a `tokenizer.json`; or a folder with one, or with `vocab.json` and `merges.txt`, `vocab.txt`, or a
                SentencePiece model and a configuration that names its class.
            roles: role ("pad", "unk", "bos", "eos", "mask") -> token text, which takes precedence over the files. None
                means the roles of the files.

        Raises:
            InputError: a file is missing or unusable, a role has no token, or a file changed since it was saved.
        """
        files = read_files(path)
        settings = files.config.get("clearhead") or {}
        special_tokens = SpecialTokens.from_json(settings["special_tokens"]) if settings.get("special_tokens") else None
        saved_roles = None if roles else _read_roles(settings)
        found_roles = saved_roles or find_roles(path, backend_of(files.document), files.config, roles or {})
        tokenizer = cls(
            files.document, kind=settings.get("kind", "pretrained"), roles=found_roles, special_tokens=special_tokens
        )
        saved = settings.get("fingerprint")
        if saved is not None and roles is None and saved != tokenizer.fingerprint:
            raise InputError(
                f"{path}: the tokenizer changed since it was saved (fingerprint {tokenizer.fingerprint[:12]}, "
                f"in its configuration {saved[:12]}): restore both files from the same save"
            )
        return tokenizer


def _read_roles(settings: Mapping[str, Any]) -> TokenRoles | None:
    """Return the roles that `save` wrote for a tokenizer with special tokens in its files; None if there are none."""
    saved = settings.get("roles")
    return None if saved is None else TokenRoles(**{**saved, "sentinels": tuple(saved["sentinels"])})


def _fingerprint(
    document: Mapping[str, Any], kind: str, roles: TokenRoles, special_tokens: SpecialTokens | None
) -> str:
    """Hash the stored document, not the library's output, so that a newer library gives the same fingerprint."""
    meaning = {key: value for key, value in document.items() if key not in ("truncation", "padding", "version")}
    content: list[Any] = [meaning, kind, roles.pad, roles.unk, roles.bos, roles.eos]
    if roles.mask is not None or roles.sentinels:
        content += [roles.mask, list(roles.sentinels)]
    if special_tokens is not None:
        content.append(special_tokens.to_json())
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _config_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}_config.json")


def _split_batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield batches of texts of limited size, since signals such as Ctrl-C wait until a call of the library ends."""
    start = size = 0
    for end, text in enumerate(texts, start=1):
        size += len(text)
        if size >= _CHARACTERS:
            yield texts[start:end]
            start, size = end, 0
    if start < len(texts):
        yield texts[start:]


def _untokenizable(texts: Sequence[object]) -> str:
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            return nth_text(index + 1) + f" of {len(texts)} must be a str, got {type(text).__name__}"
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return nth_text(index + 1) + (
                f" of {len(texts)} has the lone surrogate {text[error.start]!a} at character "
                f"{error.start + 1}, which is not Unicode text: remove it or decode the text again"
            )
    return "expected a sequence of str to tokenize"
