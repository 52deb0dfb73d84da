"""Tokens added to an existing tokenizer, or removed from it: documents in, documents out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from clearhead.errors import InputError
from clearhead.text.backend import backend_of
from clearhead.text.sentencepiece import KIND


def with_words(document: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return a document with added tokens of one id each; a text is split at them first.

    Args:
        document: the parsed content of a `tokenizer.json`.
        words: as they stand in texts; where the tokenizer lowers letters, so they are in any case.

    Raises:
        InputError: a word that is there already, is empty or stands twice, or a tokenizer that cannot learn words.
    """
    if document.get("type") == KIND:
        raise InputError("the tokenizer runs a SentencePiece model, to which no words can be added; give it rows alone")
    known = backend_of(document).vocabulary()
    faults = [f"'{word}' is in the vocabulary already, as {known[word]}" for word in words if word in known]
    faults += [f"'{word}' is given twice" for word in sorted({word for word in words if words.count(word) > 1})]
    faults += ["a word must hold more than white space"] if any(not word.strip() for word in words) else []
    if faults:
        raise InputError.from_faults(faults, subject="the new words")
    backend = tokenizers.Tokenizer.from_str(json.dumps(document))
    lowers = backend.normalizer is not None and backend.normalizer.normalize_str("A").endswith("a")
    added = [tokenizers.AddedToken(word, normalized=lowers) for word in words]
    backend.add_tokens(added)
    entries: list[dict[str, Any]] = [
        {"id": backend.token_to_id(word), "content": word, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": lowers, "special": False}
        for word in words
    ]  # fmt: skip
    taken = {index: entry for entry, index in known.items()}
    for entry in entries:
        if entry["id"] in taken:
            raise InputError(
                f"'{entry['content']}' would get the id {entry['id']}, which '{taken[entry['id']]}' has: the "
                "vocabulary has holes, behind which no words can be added"
            )
    stored = document.get("added_tokens") or []
    whole = {**document, "added_tokens": sorted([*stored, *entries], key=lambda token: token["id"])}
    found = backend_of(whole).vocabulary()
    assert all(found[entry["content"]] == entry["id"] for entry in entries), "the library numbers words as they stand"
    return whole


def with_entries(document: Mapping[str, Any], keep: Sequence[int]) -> dict[str, Any]:
    """Return a document with some of the entries, renumbered.

    Args:
        document: the parsed content of a `tokenizer.json`.
        keep: ids, each in the place of its new number.

    Raises:
        InputError: a tokenizer that cannot do without the rest, or entries in an order that it cannot have.
    """
    if document.get("type") == KIND:
        raise InputError("the tokenizer runs a SentencePiece model, of which no part can be left out")
    before = {index: entry for entry, index in backend_of(document).vocabulary().items()}
    numbers = {before[index]: place for place, index in enumerate(keep) if index in before}
    kept = _models(document["model"], numbers)
    added = [
        {**token, "id": numbers[token["content"]]}
        for token in document.get("added_tokens") or ()
        if token["content"] in numbers
    ]
    changed = {**document, "model": kept, "added_tokens": sorted(added, key=lambda token: token["id"])}
    after = backend_of(changed).vocabulary()
    moved = next((entry for entry, place in numbers.items() if after.get(entry) != place), None)
    if moved is not None:
        raise InputError(
            f"'{moved}' should become {numbers[moved]}, but the tokenizer would number it {after.get(moved)}: keep the "
            "entries in their old order, and those that were added behind the rest"
        )
    return changed


def needed_entries(document: Mapping[str, Any], ids: Iterable[int]) -> set[int]:
    """Return the entries that a tokenizer needs for some ids: these, and those that they are merged from.

    Args:
        document: the parsed content of a `tokenizer.json`.
        ids: of entries.

    Raises:
        InputError: a tokenizer of which no part can be left out.
    """
    if document.get("type") == KIND:
        raise InputError("the tokenizer runs a SentencePiece model, of which no part can be left out")
    numbers, model = backend_of(document).vocabulary(), document["model"]
    entries = {index: entry for entry, index in numbers.items()}
    merges = _merges(model)
    parts: dict[str, set[str]] = {}
    for first, second in merges:
        parts.setdefault(first + second, set()).update((first, second))
    unknown = model["vocab"][model["unk_id"]][0] if model.get("unk_id") is not None else model.get("unk_token")
    # Without an unknown token, a text loses the characters that have no entry.
    letters = {entry for entry in model["vocab"] if entry not in parts} if merges and unknown is None else set()
    if model.get("byte_fallback"):
        letters = {f"<0x{value:02X}>" for value in range(256)} & numbers.keys()
    open_ = [
        *(entries[index] for index in ids if index in entries),
        *letters,
        *([unknown] if unknown in numbers else []),
    ]
    found: set[str] = set()
    while open_:
        entry = open_.pop()
        if entry not in found:
            found.add(entry)
            open_ += parts.get(entry, ())
    return {numbers[entry] for entry in found}


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs that a model merges, in their order; their text is in one of two forms."""
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()]
    return [(first, second) for first, second in pairs]


def _models(model: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, Any]:
    """Return the model of a document with the entries that have a number."""
    kind, vocabulary = model.get("type"), model["vocab"]
    if isinstance(vocabulary, list):
        unknown = model.get("unk_id")
        if unknown is not None and vocabulary[unknown][0] not in numbers:
            raise InputError(f"'{vocabulary[unknown][0]}' stands for all that is unknown and must stay")
        kept = sorted((piece for piece in vocabulary if piece[0] in numbers), key=lambda piece: numbers[piece[0]])
        return {**model, "vocab": kept, "unk_id": None if unknown is None else numbers[vocabulary[unknown][0]]}
    left = {entry: numbers[entry] for entry in vocabulary if entry in numbers}
    unknown = model.get("unk_token")
    if unknown is not None and unknown in vocabulary and unknown not in left:
        raise InputError(f"'{unknown}' stands for all that is unknown and must stay")
    if "merges" not in model:
        return {**model, "vocab": left}
    merges = _merges(model)
    made = {first + second for first, second in merges}
    if unknown is None:
        lost = next((entry for entry in vocabulary if entry not in made and entry not in left), None)
        if lost is not None:
            raise InputError(
                f"'{lost}' is a letter of this {kind} tokenizer, without which texts would lose characters"
            )
    whole = [(first, second) for first, second in merges if {first, second, first + second} <= left.keys()]
    bare = next((entry for entry in left if entry in made and entry not in {a + b for a, b in whole}), None)
    if bare is not None:
        first, second = next(merge for merge in merges if merge[0] + merge[1] == bare)
        raise InputError(f"'{bare}' is made of '{first}' and '{second}', and can only stay with both")
    return {**model, "vocab": left, "merges": [list(merge) for merge in whole]}
