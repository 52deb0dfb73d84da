"""The files of a tokenizer, whatever their kind, as one document that a backend runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from clearhead.errors import InputError, nearest
from clearhead.files import read_json_object
from clearhead.text.backend import Backend, DocumentBackend
from clearhead.text.byte_level_files import has_merges, read_merges
from clearhead.text.sentencepiece import KIND, PieceBackend, load_pieces, piece_document, read_pieces, string_document
from clearhead.text.token_roles import content_of, sentinel
from clearhead.text.tokenizer_classes import CLASS_OF_TYPE, CLASSES, NEEDS_OWN_CODE, TokenizerClass, class_stem

FILE = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_TWO_SIDED = ("source.spm", "target.spm")
_PIECES = ("spiece.model", "sentencepiece.bpe.model", "spm.model", "tokenizer.model", "sentencepiece.model")
_ROLES = ("pad", "unk", "bos", "eos", "cls", "sep", "mask")


@dataclass(frozen=True)
class Files:
    """What the files of a folder say.

    Args:
        document: what a backend runs.
        config: `tokenizer_config.json` with what its class leaves unsaid.
        record: what its class means; None: a class that is not known, or none.
        target: the document of the other side, where each side has its own.
    """

    document: Mapping[str, Any]
    config: Mapping[str, Any]
    record: TokenizerClass | None
    target: Mapping[str, Any] | None = None


def backend_of(document: Mapping[str, Any]) -> Backend:
    """Return what runs a document.

    Raises:
        InputError: nothing can.
    """
    return PieceBackend(document) if document.get("type") == KIND else DocumentBackend(document)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds the files of a tokenizer."""
    names = (FILE, "vocab.txt", *_PIECES, _TWO_SIDED[0])
    return has_merges(folder) or any((folder / name).is_file() for name in names)


def read_files(path: Path) -> Files:
    """Read a `tokenizer.json` with the configuration beside it, or what a folder holds in its place.

    Args:
        path: the file, or a folder.

    Raises:
        InputError: files are missing, unusable, or of a kind that needs code of its own.
    """
    folder, path = (path, path / FILE) if path.is_dir() else (path.parent, path)
    config_path = path.with_name(f"{path.stem}_config.json")
    config = read_json_object(config_path, what="a tokenizer_config.json") if config_path.is_file() else {}
    if "clearhead" in config:
        return Files(read_json_object(path, what="a tokenizer.json"), config, None)
    name = _class_name(folder, config)
    record = CLASSES.get(class_stem(name)) if name is not None else None
    config = _filled(folder, config)
    if path.exists() or path.name != FILE or not has_tokenizer(folder):
        document = _with_added(path, read_json_object(path, what="a tokenizer.json"), config)
        return Files(document, _with_tokens(config, record, backend_of(document)), record)
    if record is None or name is None:
        record = _by_files(folder, name)
    target = _target_document(folder, config, record) if record.reads == "two-sided" else None
    document = _own_document(folder, config, record)
    _check_ids(folder, backend_of(document), config)
    return Files(document, _with_tokens(config, record, backend_of(document)), record, target)


def _class_name(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the class that the configuration names, or the one that belongs to the type of the model."""
    name = config.get("tokenizer_class")
    if isinstance(name, str) and class_stem(name) in {**CLASSES, **NEEDS_OWN_CODE}:
        return name
    model = folder / "config.json"
    kind = read_json_object(model, what="a config.json").get("model_type") if model.is_file() else None
    found = CLASS_OF_TYPE.get(kind) if isinstance(kind, str) and name is None else None
    return found or (name if isinstance(name, str) else None)


def _filled(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration, with what only older files beside it say."""
    filled = dict(config)
    older = folder / "special_tokens_map.json"
    if older.is_file():
        filled = read_json_object(older, what="a special_tokens_map.json") | filled
    added = folder / "added_tokens.json"
    if added.is_file() and "added_tokens_decoder" not in filled:
        entries = read_json_object(added, what="an added_tokens.json")
        filled["added_tokens_decoder"] = {str(index): {"content": token} for token, index in entries.items()}
    return filled


def _with_tokens(config: Mapping[str, Any], record: TokenizerClass | None, backend: Backend) -> dict[str, Any]:
    """Return the configuration with the tokens that the class gives to roles, where the vocabulary has them."""
    if record is None:
        return dict(config)
    entries = backend.vocabulary()
    unsaid = {f"{role}_token": token for role, token in record.tokens.items() if token in entries}
    return unsaid | {key: value for key, value in config.items() if value is not None or key not in unsaid}


def _by_files(folder: Path, name: str | None) -> TokenizerClass:
    """Return what files without a known class can only mean.

    Raises:
        InputError: they can mean several things.
    """
    if name is not None and class_stem(name) in NEEDS_OWN_CODE:
        why = NEEDS_OWN_CODE[class_stem(name)]
        raise InputError(f"{folder}: a tokenizer of class {name} is read from a {FILE} only: {why}")
    if (folder / "vocab.txt").is_file():
        return CLASSES["Bert"]
    if has_merges(folder):
        return CLASSES["GPT2"]
    named = f"the class {name!r} is not known{nearest(name, CLASSES)}" if name else f"{_CONFIG} names no class"
    raise InputError(
        f"{folder}: a SentencePiece model alone does not say which ids its pieces have, and {named}; "
        f"expected a {FILE}, or a tokenizer_class of {', '.join(sorted(CLASSES))}"
    )


def _own_document(folder: Path, config: Mapping[str, Any], record: TokenizerClass) -> dict[str, Any]:
    if record.reads == "byte-bpe":
        spaced = config.get("add_prefix_space", record.prefix_space) is True
        document = read_merges(folder, prefix_space=spaced)
        return _with_added(folder, document, config)
    if record.reads == "wordpiece":
        return _with_added(folder, _wordpiece(folder / "vocab.txt", config, record), config)
    if record.reads == "two-sided":
        return _side(folder, config, record, _TWO_SIDED[0], "vocab.json")
    path = next((folder / name for name in _PIECES if (folder / name).is_file()), None)
    if path is None:
        raise InputError(f"{folder}: expected {FILE}, or a SentencePiece model named {' or '.join(_PIECES)}")
    if record.reads == "strings":
        return _side(folder, config, record, path.name, "vocab.json")
    return _pieces(path, config, record)


def _wordpiece(path: Path, config: Mapping[str, Any], record: TokenizerClass) -> dict[str, Any]:
    """Return the `tokenizer.json` that means the same as a list of entries, one a line.

    Source: arXiv 1810.04805, and its code, tokenization.py.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError):
        raise InputError(f"{path}: expected a list of entries in UTF-8, but it cannot be read") from None
    if config.get("do_basic_tokenize", True) is not True:
        raise InputError(f"{path}: do_basic_tokenize is off, so that words come from elsewhere; that is not supported")
    entries = [line.rstrip("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    tokens = {role: _role_token(config, record, role) for role in _ROLES}
    unknown = tokens["unk"] or "[UNK]"
    if unknown not in vocabulary:
        raise InputError(f"{path}: the unknown token '{unknown}' is not among its {len(entries)} entries")
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True) is True,
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", record.lowers) is True,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    special = sorted({token for token in tokens.values() if token in vocabulary and token is not None})
    backend.add_special_tokens(sorted(special, key=lambda token: vocabulary[token]))
    document: dict[str, Any] = json.loads(backend.to_str())
    return document


def _role_token(config: Mapping[str, Any], record: TokenizerClass, role: str) -> str | None:
    return content_of(config.get(f"{role}_token")) or record.tokens.get(role)


def _role_tokens(config: Mapping[str, Any], record: TokenizerClass, known: set[str]) -> set[str]:
    """Return the tokens of roles, as far as the vocabulary has them."""
    tokens = (_role_token(config, record, role) for role in _ROLES)
    return {token for token in tokens if token is not None and token in known}


def _pieces(path: Path, config: Mapping[str, Any], record: TokenizerClass) -> dict[str, Any]:
    """Return the document of a model whose piece numbers give the ids."""
    content = read_pieces(path)
    model = load_pieces(content, str(path))
    _check_pieces(path, config, model)
    size = model.get_piece_size()
    pieces = {model.id_to_piece(number) for number in range(size)} | set(record.front)
    next_id = size + len(record.front) - record.skip
    added = {}
    for entry in record.behind:
        if entry not in pieces:
            added[entry], next_id = next_id, next_id + 1
    count = config.get("extra_ids", record.sentinels) if record.sentinels else 0
    added |= {sentinel(number): next_id + count - 1 - number for number in range(count)}
    special = {*added, *record.front}
    for index, token in _added_entries(path, config).items():
        if token["content"] not in pieces and token["content"] not in added:
            added[token["content"]] = index
        if token.get("special", True):
            special.add(token["content"])
    known = pieces | set(added)
    special |= {model.id_to_piece(number) for number in range(size) if model.is_control(number)}
    special |= _role_tokens(config, record, known)
    return piece_document(
        content,
        front=record.front,
        skip=record.skip,
        added=added,
        special=sorted(special),
        unknown=_unknown(path, config, record, known),
    )


def _check_pieces(path: Path, config: Mapping[str, Any], model: Any) -> None:
    """Refuse settings that change what the model alone would say."""
    faults = []
    if config.get("legacy") is False and model.encode(" a", out_type=str) != model.encode("a", out_type=str):
        faults.append("legacy is off, which treats a space in front of a text in a way that only a tokenizer.json says")
    faults += [
        f"{key} is {config[key]!r}, which only a tokenizer.json says how to do"
        for key in ("do_lower_case", "split_by_punct", "sp_model_kwargs")
        if config.get(key)
    ]
    if faults:
        raise InputError.from_faults([f"{path}: {fault}" for fault in faults], subject=str(path))


def _side(
    folder: Path, config: Mapping[str, Any], record: TokenizerClass, model: str, vocabulary: str
) -> dict[str, Any]:
    """Return the document of a model whose pieces are looked up in a vocabulary."""
    content = read_pieces(folder / model)
    entries = read_json_object(folder / vocabulary, what="a vocabulary")
    wrong = next((entry for entry, index in entries.items() if type(index) is not int or index < 0), None)
    if wrong is not None:
        raise InputError(f"{folder / vocabulary}: entry {wrong!r} has the id {entries[wrong]!r}; expected a number")
    named = config.get("language_codes", record.language_set)
    if named != record.language_set:
        raise InputError(f"{folder}: the language codes '{named}' are not known; expected '{record.language_set}'")
    codes = [record.language_form.format(code) for code in record.languages]
    added = {code: len(entries) + number for number, code in enumerate(codes) if code not in entries}
    for index, token in _added_entries(folder, config).items():
        if token["content"] not in entries:
            added[token["content"]] = index
    special = _role_tokens(config, record, set(entries))
    return string_document(
        content,
        vocabulary=entries,
        added=added,
        special=sorted(special | set(codes)),
        unknown=_unknown(folder / vocabulary, config, record, set(entries)),
        codes=record.reads == "two-sided",
    )


def _target_document(folder: Path, config: Mapping[str, Any], record: TokenizerClass) -> dict[str, Any]:
    own = "target_vocab.json" if config.get("separate_vocabs") is True else "vocab.json"
    # A code in front of a text says what to translate into; the target side never reads one.
    return _side(folder, config, record, _TWO_SIDED[1], own) | {"codes": False}


def _unknown(path: Path, config: Mapping[str, Any], record: TokenizerClass, known: set[str]) -> str:
    token = _role_token(config, record, "unk")
    if token is None or token not in known:
        raise InputError(f"{path}: the unknown token '{token}' is not in the vocabulary")
    return token


def _added_entries(path: Path, config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the entries of `added_tokens_decoder`, by id."""
    entries = config.get("added_tokens_decoder") or {}
    try:
        found = {int(index): dict(entry) for index, entry in entries.items()}
        assert all(isinstance(entry["content"], str) for entry in found.values())
    except (AttributeError, AssertionError, KeyError, TypeError, ValueError):
        raise InputError(f"{path}: added_tokens_decoder must be a record of ids and token records") from None
    return dict(sorted(found.items()))


def _with_added(path: Path, document: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `tokenizer.json` with the tokens that only its configuration adds.

    Raises:
        InputError: the two say different things about an id.
    """
    entries = _added_entries(path, config)
    stored: Sequence[Mapping[str, Any]] = document.get("added_tokens") or []
    known = {token["content"] for token in stored}
    fresh = [
        {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        | entry
        | {"id": index}
        for index, entry in entries.items()
        if entry["content"] not in known
    ]
    fresh = [{key: token[key] for key in _TOKEN_KEYS} for token in fresh]
    whole = {**document, "added_tokens": sorted([*stored, *fresh], key=lambda token: token["id"])}
    if entries:
        _check_ids(path, backend_of(whole), config)
    return whole if fresh else document


def _check_ids(path: Path, backend: Backend, config: Mapping[str, Any]) -> None:
    """Refuse a configuration that says other ids than the vocabulary."""
    found = backend.vocabulary()
    faults = [
        f"{path}: the configuration gives '{entry['content']}' the id {index}, the tokenizer "
        f"{found.get(entry['content'])}; restore both files from the same save"
        for index, entry in _added_entries(path, config).items()
        if found.get(entry["content"]) != index
    ]
    if faults:
        raise InputError.from_faults(faults, subject=str(path))


_TOKEN_KEYS = ("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special")
