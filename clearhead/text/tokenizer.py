"""One side's tokenizer: text to ids and back, with its roles, its kind and a fingerprint that checkpoints remember."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from clearhead.errors import InputError, nearest
from clearhead.text.files import read_json_object, write_json

# Names under which published tokenizers keep each role, in the order in which they are looked for.
WELL_KNOWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
        "unk": ("<unk>", "[UNK]", "<|unk|>"),
        "bos": ("<s>", "<bos>", "[BOS]", "<|startoftext|>", "<|begin_of_text|>", "[CLS]"),
        "eos": ("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "[SEP]"),
    }
)
_JOINED = re.compile(r"@@(?: |$)")


@dataclass(frozen=True)
class Roles:
    """The ids that have a meaning of their own.

    Args:
        pad: fills the rectangle of a batch; never read as a mask.
        unk: stands for text outside the vocabulary, or None where every text has an encoding.
        bos: starts what a decoder reads.
        eos: ends a sequence.
    """

    pad: int
    unk: int | None
    bos: int
    eos: int


class Tokenizer:
    """Text to ids and back; equal fingerprints mean equal ids for every text.

    Args:
        document: the parsed content of a `tokenizer.json`.
        kind: how it was trained, or "pretrained" where that is not known.
        roles: the ids with a meaning of their own.

    Raises:
        InputError: the document is not one that the tokenizers library can run.
    """

    def __init__(self, document: Mapping[str, Any], *, kind: str, roles: Roles) -> None:
        self.kind = kind
        self.roles = roles
        self._document = dict(document)
        self._backend = _backend(document)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        # Published vocabularies can have holes, so the number of rows follows from the largest id.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        added = self._backend.get_added_tokens_decoder()
        self._reserved = frozenset(index for index, token in added.items() if token.special) - {roles.unk}
        self.fingerprint = _fingerprint(document, kind, roles)

    @property
    def pad_id(self) -> int:
        """The id that fills the rectangle of a batch."""
        return self.roles.pad

    @property
    def unk_id(self) -> int:
        """The id of unknown text; the padding id where every text has an encoding, so that nothing unknown exists."""
        return self.roles.pad if self.roles.unk is None else self.roles.unk

    @property
    def bos_id(self) -> int:
        """The id that starts what a decoder reads."""
        return self.roles.bos

    @property
    def eos_id(self) -> int:
        """The id that ends a sequence."""
        return self.roles.eos

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without special ids."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special ids; special tokens written in a text are plain text.

        Args:
            texts: the texts; each a str without lone surrogates.

        Raises:
            InputError: a text is not a str, or holds a lone surrogate.
        """
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            raise InputError(_untokenizable(texts)) from None
        return [self._plain(encoding.ids) for encoding in encodings]

    def _plain(self, ids: list[int]) -> list[int]:
        """Replace reserved ids: a vocabulary of words or of unigram pieces can hold "</s>" as an ordinary entry."""
        if self._reserved.isdisjoint(ids):
            return ids
        if self.roles.unk is None:
            return [index for index in ids if index not in self._reserved]
        return [self.roles.unk if index in self._reserved else index for index in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; special ids are skipped, and "@@ " is joined where the text came segmented."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return _JOINED.sub("", text) if self.kind == "split" else text

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """Return the vocabulary entry of each id, special ones included.

        Raises:
            InputError: an id is outside the vocabulary.
        """
        return [self._token(index) for index in ids]

    def _token(self, index: int) -> str:
        token = self._backend.id_to_token(index) if index >= 0 else None
        if token is None:
            raise InputError(f"token id {index} is not in the vocabulary; expected 0 to {self.vocab_size - 1}")
        return token

    def save(self, path: Path) -> None:
        """Write `tokenizer.json` and, beside it, `tokenizer_config.json` with kind, roles and fingerprint.

        Args:
            path: the file to write, such as run/tokenizer.json; its folder is made where needed.
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
        write_json(path, self._document)
        write_json(_config_path(path), config)

    @classmethod
    def load(cls, path: Path, *, roles: Mapping[str, str] | None = None) -> Tokenizer:
        """Load a tokenizer trained here, or any `tokenizer.json` of the tokenizers library.

        Args:
            path: the file, or a folder that holds `tokenizer.json`.
            roles: token texts for "pad", "unk", "bos", "eos"; they win over what the files say.

        Raises:
            InputError: a file is missing or unusable, a role cannot be found, or a file changed since it was saved.
        """
        path = path / "tokenizer.json" if path.is_dir() else path
        document = read_json_object(path, what="a tokenizer.json")
        config_path = _config_path(path)
        config = read_json_object(config_path, what="a tokenizer_config.json") if config_path.is_file() else {}
        own = config.get("clearhead") or {}
        tokenizer = cls(
            document, kind=own.get("kind", "pretrained"), roles=_find_roles(path, document, config, roles or {})
        )
        saved = own.get("fingerprint")
        if saved is not None and roles is None and saved != tokenizer.fingerprint:
            raise InputError(
                f"{path}: the tokenizer changed since it was saved (fingerprint {tokenizer.fingerprint[:12]}, "
                f"{config_path.name} says {saved[:12]}); restore both files from the same save"
            )
        return tokenizer


def _backend(document: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # noqa: BLE001 the library raises plain Exception for every malformed document
        raise InputError(
            f"expected the content of a tokenizer.json, but the tokenizers library says: {error}"
        ) from None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # "</s>" typed by a user is five characters, not the end of the sentence
    return backend


def _fingerprint(document: Mapping[str, Any], kind: str, roles: Roles) -> str:
    """Hash the document as stored, not as the library writes it, so that a newer library gives the same fingerprint."""
    meaning = {key: value for key, value in document.items() if key not in ("truncation", "padding", "version")}
    content = [meaning, kind, roles.pad, roles.unk, roles.bos, roles.eos]
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _config_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}_config.json")


def _find_roles(path: Path, document: Mapping[str, Any], config: Mapping[str, Any], given: Mapping[str, str]) -> Roles:
    unknown = [role for role in given if role not in WELL_KNOWN]
    if unknown:
        raise InputError(
            f"'{unknown[0]}' is not a role; expected pad, unk, bos or eos{nearest(unknown[0], WELL_KNOWN)}"
        )
    backend = _backend(document)
    added = {token.content: index for index, token in backend.get_added_tokens_decoder().items()}
    found: dict[str, int | None] = {}
    for role, names in WELL_KNOWN.items():
        named = given.get(role) or _content(config.get(f"{role}_token"))
        if named is None:
            found[role] = next((added[name] for name in names if name in added), None)
            continue
        found[role] = backend.token_to_id(named)
        if found[role] is None:
            valid = nearest(named, backend.get_vocab(with_added_tokens=True))
            raise InputError(f"{path}: the {role} token '{named}' is not in the vocabulary{valid}")
    eos = found["eos"]
    if eos is None:
        raise InputError(f"{path}: no end token among {sorted(added) or 'no added tokens'}; name it as the eos role")
    pad = eos if found["pad"] is None else found["pad"]
    # Checkpoints without a start token (T5, Marian) start their decoder with the padding token.
    bos = pad if found["bos"] is None else found["bos"]
    return Roles(pad=pad, unk=found["unk"] if found["unk"] != eos else None, bos=bos, eos=eos)


def _content(entry: object) -> str | None:
    """Return the text of a token entry, which published files write as a string or as a record."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _untokenizable(texts: Sequence[object]) -> str:
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            return f"text {index + 1} of {len(texts)} is a {type(text).__name__}; expected a str"
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return (
                f"text {index + 1} of {len(texts)} holds the lone surrogate {text[error.start]!a} at character "
                f"{error.start + 1}, which is not Unicode text; remove it or decode the text anew"
            )
    return "expected a sequence of str to tokenize"
