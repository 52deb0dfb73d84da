"""What a tokenizer file of a stranger may hold: an allow-list with bounds, checked before a library runs it."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np

from clearhead.base.errors import InputError, shortened
from clearhead.text.patterns import pattern_fault

# The parts of a tokenizer.json by their kinds. A file from before kinds were written has a model without one.
_KINDS: Mapping[str, frozenset[str]] = {
    "normalizer": frozenset(
        "Sequence NFC NFD NFKC NFKD Nmt Lowercase Strip StripAccents Replace Prepend Precompiled BertNormalizer "
        "ByteLevel".split()
    ),
    "pre_tokenizer": frozenset(
        "Sequence ByteLevel Metaspace Split Whitespace WhitespaceSplit Punctuation Digits BertPreTokenizer "
        "CharDelimiterSplit UnicodeScripts FixedLength".split()
    ),
    "decoder": frozenset(
        "Sequence ByteLevel Metaspace WordPiece BPEDecoder CTC Replace Fuse Strip ByteFallback".split()
    ),
    "post_processor": frozenset("Sequence TemplateProcessing BertProcessing RobertaProcessing ByteLevel".split()),
}
_MODELS = ("BPE", "WordPiece", "WordLevel", "Unigram", None)
_CHILDREN = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "decoder": "decoders",
    "post_processor": "processors",
}
MOST_PARTS, LONGEST_TEXT, MOST_GROWTH, LONGEST_WORD, LONGEST_REPLACEMENT = 64, 64, 2**10, 1000, 256
# XLM-V has 901,629 entries, and Gemma more than 500,000 merges.
MOST: Mapping[str, int] = {"entries": 2**20, "pieces": 2**20, "merges": 2**20, "added tokens": 2**16}


def check_document(document: Mapping[str, Any], name: str) -> None:
    """Refuse a `tokenizer.json` that could take all time or memory.

    Args:
        document: the parsed content.
        name: of the file, for messages.

    Raises:
        InputError: a kind of part that is not known, or one out of bounds; all are named.
    """
    faults: list[str] = []
    for stage in _KINDS:
        faults += _stage_faults(stage, list(_parts(document.get(stage), stage)))
    model = document.get("model")
    if not isinstance(model, Mapping) or model.get("type") not in _MODELS:
        faults.append("the model is of a kind that is not supported")
    else:
        faults += [f"model: {fault}" for fault in _part_faults(model)]
        for key, what in (("vocab", "entries"), ("merges", "merges")):
            table = model.get(key)
            if isinstance(table, Sized) and (fault := size_fault(len(table), what)) is not None:
                faults.append(fault)
    if faults:
        raise InputError.from_faults([f"{name}: {fault}" for fault in faults], subject=name)


def _stage_faults(stage: str, parts: list[Any]) -> Iterator[str]:
    """Find what is wrong with the parts of a normalizer or another stage, those inside a sequence included."""
    if len(parts) > MOST_PARTS:
        yield f"{stage} has {len(parts)} parts, more than {MOST_PARTS}"
    growth = 1
    for part in parts[:MOST_PARTS]:
        kind = part.get("type") if isinstance(part, Mapping) else part
        if not isinstance(kind, str) or kind not in _KINDS[stage] or not isinstance(part, Mapping):
            yield f"{stage} is of the kind {shortened(str(kind))!r}, which is not supported"
            continue
        for fault in _part_faults(part):
            yield f"{stage}, {kind}: {fault}"
        growth *= _growth(part)
    if growth > MOST_GROWTH:
        yield f"{stage} can make a text {growth} times as long, more than {MOST_GROWTH}"


def size_fault(count: int, what: str = "entries") -> str | None:
    """Return what is wrong with a vocabulary of so many entries, or other things that have a `MOST`; None: nothing."""
    most = MOST[what]
    return f"{count:,} {what} are too many for a vocabulary (at most {most:,})" if count > most else None


def check_size(count: int, name: object, what: str = "entries") -> None:
    """Refuse a vocabulary that no tokenizer should load.

    Args:
        count: of what it holds.
        name: of the file, for the message.
        what: it holds.

    Raises:
        InputError: it has too many.
    """
    if (fault := size_fault(count, what)) is not None:
        raise InputError(f"{name}: {fault}")


def _parts(part: Any, stage: str) -> Iterator[Any]:
    if part is None:
        return
    yield part
    inner = part.get(_CHILDREN[stage]) if isinstance(part, Mapping) and part.get("type") == "Sequence" else None
    for child in inner if isinstance(inner, list) else ():
        yield from _parts(child, stage)


def _part_faults(part: Mapping[str, Any]) -> Iterator[str]:
    for key in ("content", "prepend", "prefix", "suffix", "continuing_subword_prefix", "end_of_word_suffix"):
        text = part.get(key)
        if isinstance(text, str) and len(text) > LONGEST_TEXT:
            yield f"{key} has {len(text)} characters, more than {LONGEST_TEXT}"
    pattern = part.get("pattern")
    pattern = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    if isinstance(pattern, str) and (fault := pattern_fault(pattern)) is not None:
        yield f"the pattern {shortened(pattern)!r} {fault}, so that it may take forever"
    if part.get("type") == "FixedLength" and not (type(part.get("length")) is int and part["length"] > 0):
        yield f"length is {shortened(str(part.get('length')))}; expected a number from 1"
    longest = part.get("max_input_chars_per_word")
    if type(longest) is int and longest > LONGEST_WORD:
        yield f"max_input_chars_per_word is {longest}, more than {LONGEST_WORD}"
    if part.get("type") == "TemplateProcessing":
        yield from _template_faults(part)
    if part.get("type") == "Precompiled":
        content = part.get("precompiled_charsmap")
        try:
            table = base64.b64decode(content if isinstance(content, str) else "", validate=True)
        except (binascii.Error, ValueError):
            yield "precompiled_charsmap is not in base64"
        else:
            if table and (fault := charsmap_fault(table)) is not None:
                yield fault


def _template_faults(part: Mapping[str, Any]) -> Iterator[str]:
    """Find what is out of bounds in the templates around texts, and tokens in them that no entry explains."""
    tokens = part.get("special_tokens")
    tokens = tokens if isinstance(tokens, Mapping) else {}
    lists = [("special_tokens", tokens), ("single", part.get("single")), ("pair", part.get("pair"))]
    lists += [("a special token", entry.get("ids")) for entry in tokens.values() if isinstance(entry, Mapping)]
    for name, items in lists:
        if isinstance(items, Sized) and len(items) > MOST_PARTS:
            yield f"{name} has {len(items)} parts, more than {MOST_PARTS}"
    for name in ("single", "pair"):
        template = part.get(name)
        for item in template[:MOST_PARTS] if isinstance(template, list) else ():
            token = item.get("SpecialToken") if isinstance(item, Mapping) else None
            text = token.get("id") if isinstance(token, Mapping) else None
            if isinstance(text, str) and text not in tokens:
                yield f"{name} has the token {shortened(text)!r}, which is not among its special_tokens"


def _growth(part: Mapping[str, Any]) -> int:
    """Return how many characters a replacement can make of one; an empty match is before each character."""
    text = part.get("content")
    if part.get("type") != "Replace" or not isinstance(text, str):
        return 1
    return max(1, len(text) if _is_literal(part) else len(text) + 1)


def _is_literal(part: Mapping[str, Any]) -> bool:
    pattern = part.get("pattern")
    return isinstance(pattern, Mapping) and bool(pattern.get("String"))


def charsmap_fault(table: bytes) -> str | None:
    """Return what is wrong with a compiled table of replacements; None: all of its links lead into it.

    The libraries follow these links without a check. A table is a trie of 32-bit units (a double array), its size in
    front, and the replacements behind it, each ending with a zero byte.

    Args:
        table: `precompiled_charsmap` of SentencePiece.

    Source: the format of Darts-clone, github.com/s-yata/darts-clone, darts.h.
    """
    size = int.from_bytes(table[:4], "little")
    texts = table[4 + size :]
    if len(table) < 4 or size % 1024 or not 0 < size <= len(table) - 4 or not texts.endswith(b"\0"):
        return "its table of replacements is damaged"
    if max(map(len, texts.split(b"\0"))) > LONGEST_REPLACEMENT:
        return f"its table has a replacement of more than {LONGEST_REPLACEMENT} bytes"
    units = np.frombuffer(table, "<u4", count=size // 4, offset=4).astype(np.int64)
    offset = (units >> 10) << ((units & 512) >> 6)
    inner = units >> 31 == 0
    places = (np.arange(len(units)) ^ offset)[inner]
    if ((places | 255) >= len(units)).any():
        return "its table of replacements is damaged"
    leaves = units[places[(units[inner] & 256) != 0]] & (2**31 - 1)
    return "its table of replacements is damaged" if (leaves >= len(texts)).any() else None
