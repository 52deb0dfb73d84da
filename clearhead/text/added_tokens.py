"""Add tokens to the parsed content of a `tokenizer.json` (a document), or remove entries, in a new document."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from clearhead.base.errors import InputError
from clearhead.text.backend import backend_of
from clearhead.text.sentencepiece import KIND


def with_words(document: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return a `tokenizer.json` document with new words; each becomes an added token, at which texts are split first.

    Args:
        document: parsed content of a `tokenizer.json`.
        words: new words as they occur in texts; case-insensitive if the tokenizer lowercases.

    Raises:
        InputError: a word exists already, is empty or occurs twice, or the tokenizer cannot learn words.
    """
    if document.get("type") == KIND:
        raise InputError("no words can be added to a tokenizer with a SentencePiece model: add only embedding rows")
    known = backend_of(document).vocabulary()
    faults = _word_faults(words, known)
    if faults:
        raise InputError.from_faults(faults, subject="the new words")
    entries = _added_entries(document, words)
    taken = {index: entry for entry, index in known.items()}
    for entry in entries:
        if entry["id"] in taken:
            raise InputError(
                f"'{entry['content']}' would get the id {entry['id']}, which '{taken[entry['id']]}' has: no words can "
                "be added to a vocabulary with unused ids"
            )
    stored = document.get("added_tokens") or []
    whole = {**document, "added_tokens": sorted([*stored, *entries], key=lambda token: token["id"])}
    numbers = backend_of(whole).vocabulary()
    assert all(numbers[entry["content"]] == entry["id"] for entry in entries), "the library keeps the given ids"
    return whole


def _word_faults(words: Sequence[str], known: Mapping[str, int]) -> list[str]:
    repeated = sorted({word for word in words if words.count(word) > 1})
    faults = [f"'{word}' is already in the vocabulary, with the id {known[word]}" for word in words if word in known]
    faults += [f"'{word}' is given twice" for word in repeated]
    if any(not word.strip() for word in words):
        faults.append("a word must have a character that is not white space")
    return faults


def _added_entries(document: Mapping[str, Any], words: Sequence[str]) -> list[dict[str, Any]]:
    """Return the `added_tokens` entries of words, with the ids that the tokenizers library assigns."""
    backend = tokenizers.Tokenizer.from_str(json.dumps(document))
    lowers = backend.normalizer is not None and backend.normalizer.normalize_str("A").endswith("a")
    backend.add_tokens([tokenizers.AddedToken(word, normalized=lowers) for word in words])
    return [
        {"id": backend.token_to_id(word), "content": word, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": lowers, "special": False}
        for word in words
    ]  # fmt: skip


def with_entries(document: Mapping[str, Any], keep: Sequence[int]) -> dict[str, Any]:
    """Return a `tokenizer.json` document with only some entries of the vocabulary, which get new ids.

    Args:
        document: parsed content of a `tokenizer.json`.
        keep: old ids to keep; the index in this list is the new id.

    Raises:
        InputError: the tokenizer needs an entry that is left out, or cannot have the entries in this order.
    """
    if document.get("type") == KIND:
        raise InputError("no entries can be removed from a tokenizer with a SentencePiece model: keep all of them")
    before = {index: entry for entry, index in backend_of(document).vocabulary().items()}
    numbers = {before[index]: new_id for new_id, index in enumerate(keep) if index in before}
    model = _models(document["model"], numbers)
    added = [
        {**token, "id": numbers[token["content"]]}
        for token in document.get("added_tokens") or ()
        if token["content"] in numbers
    ]
    changed = {**document, "model": model, "added_tokens": sorted(added, key=lambda token: token["id"])}
    after = backend_of(changed).vocabulary()
    moved = next((entry for entry, new_id in numbers.items() if after.get(entry) != new_id), None)
    if moved is not None:
        raise InputError(
            f"'{moved}' should get the id {numbers[moved]}, but the tokenizer would give it {after.get(moved)}: keep "
            "the old order of the entries, with added tokens last"
        )
    return changed


def needed_entries(document: Mapping[str, Any], ids: Iterable[int]) -> set[int]:
    """Return the ids that a smaller tokenizer must keep: `ids`, ids that are merged to them, and fallback entries.

    Args:
        document: parsed content of a `tokenizer.json`.
        ids: ids of the required entries.

    Raises:
        InputError: no entry of the tokenizer can be left out.
    """
    if document.get("type") == KIND:
        raise InputError("no entries can be removed from a tokenizer with a SentencePiece model: keep all of them")
    numbers, model = backend_of(document).vocabulary(), document["model"]
    entries = {index: entry for entry, index in numbers.items()}
    halves: dict[str, set[str]] = {}
    for first, second in _merges(model):
        halves.setdefault(first + second, set()).update((first, second))
    unvisited = [entries[index] for index in ids if index in entries]
    unknown = model["vocab"][model["unk_id"]][0] if model.get("unk_id") is not None else model.get("unk_token")
    if unknown in numbers:
        unvisited.append(unknown)
    if model.get("byte_fallback"):
        unvisited += {f"<0x{value:02X}>" for value in range(256)} & numbers.keys()
    elif halves and unknown is None:
        # Without an unknown token, characters without an entry would be lost: keep all single characters.
        unvisited += model["vocab"].keys() - halves.keys()
    needed: set[str] = set()
    while unvisited:
        entry = unvisited.pop()
        if entry not in needed:
            needed.add(entry)
            unvisited += halves.get(entry, ())
    return {numbers[entry] for entry in needed}


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the BPE merges of a tokenizer's model, in order; files store a merge as "a b" or as ["a", "b"]."""
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
    return [(first, second) for first, second in pairs]


def _models(model: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, Any]:
    """Return the `model` entry of a `tokenizer.json`, reduced to the vocabulary entries that have a new id."""
    if isinstance(model["vocab"], list):
        return _with_pieces(model, numbers)
    vocabulary = {entry: numbers[entry] for entry in model["vocab"] if entry in numbers}
    unknown = model.get("unk_token")
    if unknown is not None and unknown in model["vocab"] and unknown not in vocabulary:
        raise InputError(f"'{unknown}' is the unknown token and must be kept")
    if "merges" not in model:
        return {**model, "vocab": vocabulary}
    return {**model, "vocab": vocabulary, "merges": [list(merge) for merge in _remaining_merges(model, vocabulary)]}


def _with_pieces(model: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, Any]:
    """Return a unigram model, whose vocabulary is a list of scored pieces, with only the pieces that have a new id."""
    pieces, unknown = model["vocab"], model.get("unk_id")
    if unknown is not None:
        token = pieces[unknown][0]
        if token not in numbers:
            raise InputError(f"'{token}' is the unknown token and must be kept")
        unknown = numbers[token]
    remaining = sorted((piece for piece in pieces if piece[0] in numbers), key=lambda piece: numbers[piece[0]])
    return {**model, "vocab": remaining, "unk_id": unknown}


def _remaining_merges(model: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges between remaining entries; raise InputError if an entry cannot be built from them."""
    merges = _merges(model)
    merged = {first + second for first, second in merges}
    for entry in model["vocab"] if model.get("unk_token") is None else ():
        if entry not in merged and entry not in vocabulary:
            raise InputError(
                f"'{entry}' is a single character of this {model.get('type')} tokenizer and must be kept: texts would "
                "lose it"
            )
    allowed = [(first, second) for first, second in merges if {first, second, first + second} <= vocabulary.keys()]
    unreachable = merged - {first + second for first, second in allowed}
    for entry in vocabulary:
        if entry in unreachable:
            first, second = next(merge for merge in merges if "".join(merge) == entry)
            raise InputError(f"'{entry}' is merged from '{first}' and '{second}': keep both, or remove it")
    return allowed
