"""Byte-level BPE tokenizers in two files: `vocab.json` and `merges.txt`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from clearhead.base.errors import InputError
from clearhead.base.files import LARGEST_VOCABULARY, read_json_object, read_model_text
from clearhead.text.token_roles import WELL_KNOWN
from clearhead.text.tokenizer_checks import check_size

_VOCABULARY, _MERGES = "vocab.json", "merges.txt"
_HEADER = "#version"
_SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def has_merges(folder: Path) -> bool:
    """Return whether a folder has both files."""
    return (folder / _VOCABULARY).is_file() and (folder / _MERGES).is_file()


def read_merges(folder: Path, *, prefix_space: bool) -> dict[str, Any]:
    """Return the content of the equivalent `tokenizer.json`.

    A text is split before letters, digits and other signs, each with the space before it, and every byte is written as
    a printable character; entries with a well-known role are special.

    Args:
        folder: holds `vocab.json` and `merges.txt`.
        prefix_space: whether a space is put before a text, so that its first word is the same token as anywhere else.

    Raises:
        InputError: a file is not what its name says, or a merge joins pieces that the vocabulary lacks.

    Source: GPT-2's encoder, github.com/openai/gpt-2, src/encoder.py.
    """
    vocabulary = read_json_object(folder / _VOCABULARY, what="a vocabulary", largest=LARGEST_VOCABULARY)
    check_size(len(vocabulary), folder / _VOCABULARY)
    wrong = next((entry for entry, index in vocabulary.items() if type(index) is not int or index < 0), None)
    if wrong is not None:
        raise InputError(
            f"{folder / _VOCABULARY}: entry {wrong!r} has the id {vocabulary[wrong]!r}; expected a number from 0"
        )
    # The library writes what surrounds the tables; to write and read these too takes a fifth of a second.
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
            raise InputError(f"{path}:{number}: expected two pieces separated by one space, received {line!r}")
        first, second = pair
        if first not in vocabulary or second not in vocabulary or first + second not in vocabulary:
            missing = next(piece for piece in (first, second, first + second) if piece not in vocabulary)
            raise InputError(f"{path}:{number}: {missing!r} is not in {_VOCABULARY}; the two files must be of one save")
        pairs.append(pair)
    return pairs
