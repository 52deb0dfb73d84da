"""Read the files of a tokenizer, of any format, into one document that a backend can run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tokenizers
from pydantic import BaseModel, Field
from tokenizers import decoders, models, normalizers, pre_tokenizers

from clearhead.base.errors import InputError, did_you_mean
from clearhead.base.files import LARGEST_VOCABULARY, convert_json, read_json_object, read_model_text
from clearhead.text.backend import Backend, backend_of
from clearhead.text.sentencepiece import (
    KIND,
    check_tables,
    decode_model,
    load_pieces,
    read_pieces,
    sentencepiece_document,
)
from clearhead.text.token_roles import WELL_KNOWN, TokenRoles, content_of, sentinel
from clearhead.text.tokenizer_checks import MOST_PARTS, check_document, check_size
from clearhead.text.tokenizer_classes import CLASS_OF_TYPE, CLASSES, NEEDS_CUSTOM_CODE, TokenizerClass, class_stem

FILE = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_TWO_SIDED = ("source.spm", "target.spm")
_PIECES = ("spiece.model", "sentencepiece.bpe.model", "spm.model", "tokenizer.model", "sentencepiece.model")
_ROLES = ("pad", "unk", "bos", "eos", "cls", "sep", "mask")


@dataclass(frozen=True)
class TokenizerFiles:
    """Content of a tokenizer's files.

    Args:
        document: document that a backend runs.
        config: content of `tokenizer_config.json` with the defaults of its class.
        tokenizer_class: class of the tokenizer. None means unknown or not needed.
        target: document of the target side. None means that both sides share one document.
    """

    document: Mapping[str, Any]
    config: Mapping[str, Any]
    tokenizer_class: TokenizerClass | None
    target: Mapping[str, Any] | None = None


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has the files of a tokenizer."""
    names = (FILE, "vocab.txt", *_PIECES, _TWO_SIDED[0])
    return has_merges(folder) or any((folder / name).is_file() for name in names)


def read_files(path: Path) -> TokenizerFiles:
    """Read a `tokenizer.json` and its configuration, or the older tokenizer files of a folder.

    Args:
        path: path of a `tokenizer.json`, or of a folder.

    Raises:
        InputError: files are missing, unusable, or of an unsupported class.
    """
    folder, path = (path, path / FILE) if path.is_dir() else (path.parent, path)
    config_path = path.with_name(f"{path.stem}_config.json")
    config = read_json_object(config_path, what="a tokenizer_config.json") if os.path.lexists(config_path) else {}
    _check_settings(config, str(config_path))
    if config.get("clearhead") is not None:
        return TokenizerFiles(read_document(path), config, None)
    name = _class_name(folder, config)
    tokenizer_class = CLASSES.get(class_stem(name)) if name is not None else None
    config = _with_older_files(folder, config)
    if os.path.lexists(path) or path.name != FILE or not has_tokenizer(folder):
        document = _with_added(path, read_document(path), config)
        return TokenizerFiles(document, _with_tokens(config, tokenizer_class, backend_of(document)), tokenizer_class)
    if tokenizer_class is None or name is None:
        tokenizer_class = _by_files(folder, name)
    target = _target_document(folder, config, tokenizer_class) if tokenizer_class.file_kind == "two-sided" else None
    document = _own_document(folder, config, tokenizer_class)
    _check_ids(folder, backend_of(document), config)
    return TokenizerFiles(
        document, _with_tokens(config, tokenizer_class, backend_of(document)), tokenizer_class, target
    )


def read_document(path: Path) -> dict[str, Any]:
    """Read and check a `tokenizer.json`.

    Raises:
        InputError: the file cannot be read, or has unsupported content.
    """
    document = read_json_object(path, what="a tokenizer.json", largest=LARGEST_VOCABULARY)
    if document.get("type") != KIND:
        added = document.get("added_tokens")
        check_size(len(added) if isinstance(added, list) else 0, path, "added tokens")
        convert_json({"added_tokens": added}, TokenizerDocument, name=str(path))
        check_document(document, str(path))
        return document
    check_tables(decode_model(convert_json(document, PiecesDocument, name=str(path)).model, str(path)), str(path))
    return document


def _check_settings(config: Mapping[str, Any], name: str) -> None:
    added = config.get("added_tokens_decoder")
    check_size(len(added) if isinstance(added, dict) else 0, name, "added tokens")
    convert_json(
        {key: config[key] for key in TokenizerConfig.model_fields if key in config}, TokenizerConfig, name=name
    )


def _class_name(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the tokenizer class of the configuration, or the class of the model type; None if unknown."""
    name = config.get("tokenizer_class")
    if isinstance(name, str) and class_stem(name) in {**CLASSES, **NEEDS_CUSTOM_CODE}:
        return name
    model = folder / "config.json"
    kind = read_json_object(model, what="a config.json").get("model_type") if model.is_file() else None
    type_class = CLASS_OF_TYPE.get(kind) if isinstance(kind, str) and name is None else None
    return type_class or (name if isinstance(name, str) else None)


def _with_older_files(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration together with `special_tokens_map.json` and `added_tokens.json` of its folder."""
    filled = dict(config)
    older = folder / "special_tokens_map.json"
    if os.path.lexists(older):
        filled = read_json_object(older, what="a special_tokens_map.json") | filled
    added = folder / "added_tokens.json"
    if os.path.lexists(added) and "added_tokens_decoder" not in filled:
        entries = read_json_object(added, what="an added_tokens.json")
        filled["added_tokens_decoder"] = {str(index): {"content": token} for token, index in entries.items()}
    _check_settings(filled, f"{folder} (settings of its tokenizer)")
    return filled


def _with_tokens(config: Mapping[str, Any], tokenizer_class: TokenizerClass | None, backend: Backend) -> dict[str, Any]:
    """Return the configuration, completed with the special tokens of its class that are in the vocabulary."""
    if tokenizer_class is None:
        return dict(config)
    entries = backend.vocabulary()
    defaults = {f"{role}_token": token for role, token in tokenizer_class.tokens.items() if token in entries}
    return defaults | {key: value for key, value in config.items() if value is not None or key not in defaults}


def _by_files(folder: Path, name: str | None) -> TokenizerClass:
    """Guess the tokenizer class from the names of the files, if the configuration names no known class.

    Raises:
        InputError: the files do not determine the class.
    """
    if name is not None and class_stem(name) in NEEDS_CUSTOM_CODE:
        why = NEEDS_CUSTOM_CODE[class_stem(name)]
        raise InputError(f"{folder}: a tokenizer of class {name} needs a {FILE}, since {why}")
    if (folder / "vocab.txt").is_file():
        return CLASSES["Bert"]
    if has_merges(folder):
        return CLASSES["GPT2"]
    named = f"the class {name!r} is not known{did_you_mean(name, CLASSES)}" if name else f"{_CONFIG} names no class"
    raise InputError(
        f"{folder}: the ids of a SentencePiece model depend on the tokenizer's class, and {named}; "
        f"add a {FILE}, or set tokenizer_class to one of {', '.join(sorted(CLASSES))}"
    )


def _own_document(folder: Path, config: Mapping[str, Any], tokenizer_class: TokenizerClass) -> dict[str, Any]:
    if tokenizer_class.file_kind == "byte-bpe":
        spaced = config.get("add_prefix_space", tokenizer_class.prefix_space) is True
        document = read_merges(folder, prefix_space=spaced)
        return _with_added(folder, document, config)
    if tokenizer_class.file_kind == "wordpiece":
        return _with_added(folder, _wordpiece_document(folder / "vocab.txt", config, tokenizer_class), config)
    if tokenizer_class.file_kind == "two-sided":
        return _vocabulary_document(folder, config, tokenizer_class, _TWO_SIDED[0], "vocab.json")
    path = next((folder / name for name in _PIECES if (folder / name).is_file()), None)
    if path is None:
        raise InputError(f"{folder} must have {FILE}, or a SentencePiece model named {' or '.join(_PIECES)}")
    if tokenizer_class.file_kind == "strings":
        return _vocabulary_document(folder, config, tokenizer_class, path.name, "vocab.json")
    return _piece_document(path, config, tokenizer_class)


def _wordpiece_document(path: Path, config: Mapping[str, Any], tokenizer_class: TokenizerClass) -> dict[str, Any]:
    """Return the `tokenizer.json` that is equivalent to a WordPiece vocabulary with one entry per line.

    Source: arXiv 1810.04805, and its code, tokenization.py.
    """
    text = read_model_text(path, what="a vocabulary", largest=LARGEST_VOCABULARY)
    check_size(text.count("\n"), path)
    lines = text.split("\n")
    if config.get("do_basic_tokenize", True) is not True:
        raise InputError(f"{path}: do_basic_tokenize must be true; false needs a tokenizer.json")
    entries = [line.rstrip("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    unknown = _role_token(config, tokenizer_class, "unk") or "[UNK]"
    if unknown not in vocabulary:
        raise InputError(f"{path}: the unknown token '{unknown}' must be one of its {len(entries)} entries: add it")
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True) is True,
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", tokenizer_class.lowers) is True,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    special = _role_tokens(config, tokenizer_class, set(vocabulary))
    backend.add_special_tokens(sorted(special, key=lambda token: vocabulary[token]))
    document: dict[str, Any] = json.loads(backend.to_str())
    return document


def _role_token(config: Mapping[str, Any], tokenizer_class: TokenizerClass, role: str) -> str | None:
    return content_of(config.get(f"{role}_token")) or tokenizer_class.tokens.get(role)


def _role_tokens(config: Mapping[str, Any], tokenizer_class: TokenizerClass, known: set[str]) -> set[str]:
    """Return the tokens of all roles that are in the vocabulary."""
    tokens = (_role_token(config, tokenizer_class, role) for role in _ROLES)
    return {token for token in tokens if token is not None and token in known}


def _piece_document(path: Path, config: Mapping[str, Any], tokenizer_class: TokenizerClass) -> dict[str, Any]:
    """Return the document of a SentencePiece model whose piece numbers determine the ids."""
    content = read_pieces(path)
    model = load_pieces(content, str(path))
    _check_pieces(path, config, model)
    size = model.get_piece_size()
    pieces = {model.id_to_piece(number) for number in range(size)} | set(tokenizer_class.front)
    next_id = size + len(tokenizer_class.front) - tokenizer_class.skip
    added = {}
    for entry in tokenizer_class.last_entries:
        if entry not in pieces:
            added[entry], next_id = next_id, next_id + 1
    count = config.get("extra_ids", tokenizer_class.sentinels) if tokenizer_class.sentinels else 0
    added |= {sentinel(number): next_id + count - 1 - number for number in range(count)}
    special = {*added, *tokenizer_class.front}
    for index, token in _added_entries(config).items():
        if token["content"] not in pieces and token["content"] not in added:
            added[token["content"]] = index
        if token.get("special", True):
            special.add(token["content"])
    known = pieces | set(added)
    special |= {model.id_to_piece(number) for number in range(size) if model.is_control(number)}
    special |= _role_tokens(config, tokenizer_class, known)
    return sentencepiece_document(
        content,
        front=list(tokenizer_class.front),
        skip=tokenizer_class.skip,
        added=added,
        special=sorted(special),
        unknown=_unknown(path, config, tokenizer_class, known),
    )


def _check_pieces(path: Path, config: Mapping[str, Any], model: Any) -> None:
    """Refuse settings that would change the tokenization of the SentencePiece model."""
    faults = []
    if config.get("legacy") is False and model.encode(" a", out_type=str) != model.encode("a", out_type=str):
        faults.append("legacy = false needs a tokenizer.json")
    faults += [
        f"{key} = {config[key]!r} needs a tokenizer.json"
        for key in ("do_lower_case", "split_by_punct", "sp_model_kwargs")
        if config.get(key)
    ]
    if faults:
        raise InputError.from_faults([f"{path}: {fault}" for fault in faults], subject=str(path))


def _vocabulary_document(
    folder: Path, config: Mapping[str, Any], tokenizer_class: TokenizerClass, model: str, vocabulary: str
) -> dict[str, Any]:
    """Return the document of a SentencePiece model whose pieces are looked up in a vocabulary."""
    content = read_pieces(folder / model)
    entries = read_json_object(folder / vocabulary, what="a vocabulary", largest=LARGEST_VOCABULARY)
    check_size(len(entries), folder / vocabulary)
    wrong = next((entry for entry, index in entries.items() if type(index) is not int or index < 0), None)
    if wrong is not None:
        raise InputError(f"{folder / vocabulary}: entry {wrong!r} has the id {entries[wrong]!r}, expected 0 or more")
    named = config.get("language_codes", tokenizer_class.language_set)
    if named != tokenizer_class.language_set:
        raise InputError(
            f"{folder}: the language codes '{named}' are unknown, expected '{tokenizer_class.language_set}'"
        )
    codes = [tokenizer_class.language_form.format(code) for code in tokenizer_class.languages]
    added = {code: len(entries) + number for number, code in enumerate(codes) if code not in entries}
    for index, token in _added_entries(config).items():
        if token["content"] not in entries:
            added[token["content"]] = index
    special = _role_tokens(config, tokenizer_class, set(entries))
    return sentencepiece_document(
        content,
        vocabulary=entries,
        added=added,
        special=sorted(special | set(codes)),
        unknown=_unknown(folder / vocabulary, config, tokenizer_class, set(entries)),
        codes=tokenizer_class.file_kind == "two-sided",
    )


def _target_document(folder: Path, config: Mapping[str, Any], tokenizer_class: TokenizerClass) -> dict[str, Any]:
    vocabulary = "target_vocab.json" if config.get("separate_vocabs") is True else "vocab.json"
    # A code at the start of a source text names the target language; target texts have no code.
    return _vocabulary_document(folder, config, tokenizer_class, _TWO_SIDED[1], vocabulary) | {"codes": False}


def _unknown(path: Path, config: Mapping[str, Any], tokenizer_class: TokenizerClass, known: set[str]) -> str:
    token = _role_token(config, tokenizer_class, "unk")
    if token is None or token not in known:
        raise InputError(f"{path}: the unknown token '{token}' must be in the vocabulary: add it")
    return token


def _added_entries(config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the entries of `added_tokens_decoder` by id, in ascending order."""
    entries = config.get("added_tokens_decoder") or {}
    return dict(sorted((int(index), dict(entry)) for index, entry in entries.items()))


def _with_added(path: Path, document: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Add the tokens that only the configuration has to a `tokenizer.json`.

    Raises:
        InputError: configuration and `tokenizer.json` give a token different ids.
    """
    entries = _added_entries(config)
    stored: Sequence[Mapping[str, Any]] = document.get("added_tokens") or []
    known = {token["content"] for token in stored}
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    fresh = []
    for index, entry in entries.items():
        if entry["content"] not in known:
            token = {**usual, **entry, "id": index}
            fresh.append({key: token[key] for key in _TOKEN_KEYS})
    whole = {**document, "added_tokens": sorted([*stored, *fresh], key=lambda token: token["id"])}
    if entries:
        _check_ids(path, backend_of(whole), config)
    return whole if fresh else document


def _check_ids(path: Path, backend: Backend, config: Mapping[str, Any]) -> None:
    """Refuse a configuration whose ids differ from those of the vocabulary."""
    vocabulary = backend.vocabulary()
    faults = [
        f"{path}: the configuration gives '{entry['content']}' the id {index}, but the tokenizer gives it "
        f"{vocabulary.get(entry['content'])}; restore both files from the same save"
        for index, entry in _added_entries(config).items()
        if vocabulary.get(entry["content"]) != index
    ]
    if faults:
        raise InputError.from_faults(faults, subject=str(path))


_TOKEN_KEYS = ("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special")


_VOCABULARY, _MERGES = "vocab.json", "merges.txt"
_HEADER = "#version"
_SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def has_merges(folder: Path) -> bool:
    """Return whether a folder has `vocab.json` and `merges.txt`."""
    return (folder / _VOCABULARY).is_file() and (folder / _MERGES).is_file()


def read_merges(folder: Path, *, prefix_space: bool) -> dict[str, Any]:
    """Return the `tokenizer.json` that is equivalent to `vocab.json` and `merges.txt` (byte-level BPE).

    A text is split into letters, digits and other signs, each with the space before it. Every byte is written as a
    printable character. Entries with a well-known role are special tokens.

    Args:
        folder: folder with `vocab.json` and `merges.txt`.
        prefix_space: True to add a space before a text, so that its first word gets the same token as elsewhere.

    Raises:
        InputError: a file has other content, or a merge joins pieces that the vocabulary lacks.

    Source: GPT-2's encoder, github.com/openai/gpt-2, src/encoder.py.
    """
    vocabulary = read_json_object(folder / _VOCABULARY, what="a vocabulary", largest=LARGEST_VOCABULARY)
    check_size(len(vocabulary), folder / _VOCABULARY)
    wrong = next((entry for entry, index in vocabulary.items() if type(index) is not int or index < 0), None)
    if wrong is not None:
        raise InputError(
            f"{folder / _VOCABULARY}: entry {wrong!r} has the id {vocabulary[wrong]!r}, expected 0 or more"
        )
    # The library writes the document without the tables, since writing and reading them takes 0.2 seconds.
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    document: dict[str, Any] = json.loads(backend.to_str())
    document["model"] |= {"vocab": vocabulary, "merges": _read_pairs(folder / _MERGES, vocabulary)}
    special = [name for names in WELL_KNOWN.values() for name in names if name in vocabulary]
    document["added_tokens"] = [
        {"id": vocabulary[name], "content": name, **_SPECIAL} for name in sorted(special, key=vocabulary.__getitem__)
    ]
    return document


def _read_pairs(path: Path, vocabulary: Mapping[str, int]) -> list[list[str]]:
    text = read_model_text(path, what="a list of merges", largest=LARGEST_VOCABULARY)
    check_size(text.count("\n"), path, "merges")
    pairs = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith(_HEADER)):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise InputError(f"{path}:{number}: expected two pieces separated by one space, got {line!r}")
        first, second = pair
        if first not in vocabulary or second not in vocabulary or first + second not in vocabulary:
            missing = next(piece for piece in (first, second, first + second) if piece not in vocabulary)
            raise InputError(f"{path}:{number}: {missing!r} is not in {_VOCABULARY}: restore both from the same save")
        pairs.append(pair)
    return pairs


Id = Annotated[int, Field(ge=0, lt=2**31)]
TemplateItem = tuple[Id | Literal["A", "B"], Annotated[int, Field(ge=0, lt=2**15)]]
IdList = Annotated[list[Id], Field(max_length=MOST_PARTS)]
TemplateItems = Annotated[tuple[TemplateItem, ...], Field(max_length=MOST_PARTS)]


class _Token(BaseModel):
    content: str


class _AddedToken(_Token):
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class _NamedTemplate(BaseModel):
    name: str
    template: str


class SavedSpecialTokens(BaseModel):
    """Schema of the special tokens that `Tokenizer.save` writes."""

    single: TemplateItems
    pair: TemplateItems | None
    source: tuple[IdList, IdList] | None = None
    target: tuple[IdList, IdList] | None = None


class _ClearheadSettings(BaseModel):
    kind: str = "pretrained"
    fingerprint: str | None = None
    special_tokens: SavedSpecialTokens | None = None
    roles: TokenRoles | None = None


class TokenizerConfig(BaseModel):
    """Schema of a `tokenizer_config.json`, including the keys of older files."""

    clearhead: _ClearheadSettings | None = None
    tokenizer_class: str | None = None
    pad_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    cls_token: str | _Token | None = None
    sep_token: str | _Token | None = None
    mask_token: str | _Token | None = None
    additional_special_tokens: list[str | _Token] | None = None
    extra_special_tokens: list[str | _Token] | dict[str, Any] | None = None
    added_tokens_decoder: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], _AddedToken] | None = None
    extra_ids: Annotated[int, Field(ge=0, le=10_000)] = 0
    model_max_length: int | float | None = None
    src_lang: str | None = None
    language_codes: str | None = None
    do_lower_case: bool | None = None
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool | None = None
    do_basic_tokenize: bool = True
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    add_prefix_space: bool | None = None
    legacy: bool | None = None
    legacy_behaviour: bool | None = None
    separate_vocabs: bool | None = None
    split_by_punct: bool | None = None
    sp_model_kwargs: dict[str, Any] | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class _AddedTokenWithId(_AddedToken):
    id: Id


class TokenizerDocument(BaseModel):
    """Schema of the keys that are read from a `tokenizer.json`; the tokenizers library checks the rest."""

    added_tokens: list[_AddedTokenWithId] | None = None


class PiecesDocument(BaseModel):
    """Schema of a `tokenizer.json` with a SentencePiece model and the ids of its pieces."""

    model: str
    added: dict[str, Id]
    special: list[str]
    unknown: str
    vocabulary: dict[str, Id] | None = None
    front: list[str] = []
    skip: Id = 0
    codes: bool = False
