"""Check untrusted tokenizer files before a library runs them: allowed components, size limits, safe patterns.

A regular expression is refused if its running time could grow exponentially.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np

from clearhead.base.errors import InputError, shorten

# Allowed kinds of each component of a tokenizer.json. In old files, the model has no kind.
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
    """Refuse a `tokenizer.json` that could use unlimited time or memory.

    Args:
        document: parsed content of the file.
        name: name of the file, for messages.

    Raises:
        InputError: a component has an unknown kind or exceeds a limit; the message lists all faults.
    """
    faults: list[str] = []
    for stage in _KINDS:
        faults += _stage_faults(stage, list(_walk_nodes(document.get(stage), stage)))
    model = document.get("model")
    if not isinstance(model, Mapping) or model.get("type") not in _MODELS:
        faults.append("the kind of the model must be BPE, WordPiece, WordLevel or Unigram")
    else:
        faults += [f"model: {fault}" for fault in _node_faults(model)]
        for key, what in (("vocab", "entries"), ("merges", "merges")):
            table = model.get(key)
            if isinstance(table, Sized) and (fault := size_fault(len(table), what)) is not None:
                faults.append(fault)
    if faults:
        raise InputError.from_faults([f"{name}: {fault}" for fault in faults], subject=name)


def _stage_faults(stage: str, stages: list[Any]) -> Iterator[str]:
    """Yield the faults of the components of a stage, such as the normalizer, including those inside sequences."""
    if len(stages) > MOST_PARTS:
        yield f"{stage} has {len(stages)} components, more than {MOST_PARTS}"
    growth = 1
    for node in stages[:MOST_PARTS]:
        kind = node.get("type") if isinstance(node, Mapping) else node
        if not isinstance(kind, str) or kind not in _KINDS[stage] or not isinstance(node, Mapping):
            yield f"{stage} is of the kind {shorten(str(kind))!r}, which is not supported"
            continue
        for fault in _node_faults(node):
            yield f"{stage}, {kind}: {fault}"
        growth *= _growth(node)
    if growth > MOST_GROWTH:
        yield f"{stage} can make a text {growth} times as long; at most {MOST_GROWTH} times is allowed"


def size_fault(count: int, what: str = "entries") -> str | None:
    """Return the fault of a vocabulary with too many entries, merges, or other items of `MOST`; None if it is fine."""
    most = MOST[what]
    return f"{count:,} {what} are too many for a vocabulary (at most {most:,})" if count > most else None


def check_size(count: int, name: object, what: str = "entries") -> None:
    """Refuse a tokenizer file whose vocabulary has too many entries, merges or other items.

    Args:
        count: number of items.
        name: name of the file, for the message.
        what: kind of the items, a key of `MOST`.

    Raises:
        InputError: the vocabulary has too many items.
    """
    if (fault := size_fault(count, what)) is not None:
        raise InputError(f"{name}: {fault}")


def _walk_nodes(node: Any, stage: str) -> Iterator[Any]:
    if node is None:
        return
    yield node
    inner = node.get(_CHILDREN[stage]) if isinstance(node, Mapping) and node.get("type") == "Sequence" else None
    for child in inner if isinstance(inner, list) else ():
        yield from _walk_nodes(child, stage)


def _node_faults(node: Mapping[str, Any]) -> Iterator[str]:
    for key in ("content", "prepend", "prefix", "suffix", "continuing_subword_prefix", "end_of_word_suffix"):
        text = node.get(key)
        if isinstance(text, str) and len(text) > LONGEST_TEXT:
            yield f"{key} has {len(text)} characters, more than {LONGEST_TEXT}"
    pattern = node.get("pattern")
    pattern = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    if isinstance(pattern, str) and (fault := pattern_fault(pattern)) is not None:
        yield f"the pattern {shorten(pattern)!r} {fault}, so it may take forever"
    if node.get("type") == "FixedLength" and not (type(node.get("length")) is int and node["length"] > 0):
        yield f"length is {shorten(str(node.get('length')))}, expected a whole number of at least 1"
    longest = node.get("max_input_chars_per_word")
    if type(longest) is int and longest > LONGEST_WORD:
        yield f"max_input_chars_per_word is {longest}, more than {LONGEST_WORD}"
    if node.get("type") == "TemplateProcessing":
        yield from _template_faults(node)
    if node.get("type") == "Precompiled":
        content = node.get("precompiled_charsmap")
        try:
            table = base64.b64decode(content if isinstance(content, str) else "", validate=True)
        except (binascii.Error, ValueError):
            yield "precompiled_charsmap must be base64"
        else:
            if table and (fault := charsmap_fault(table)) is not None:
                yield fault


def _template_faults(node: Mapping[str, Any]) -> Iterator[str]:
    """Yield the faults of special-token templates: too many items, and tokens that are not defined."""
    tokens = node.get("special_tokens")
    tokens = tokens if isinstance(tokens, Mapping) else {}
    lists = [("special_tokens", tokens), ("single", node.get("single")), ("pair", node.get("pair"))]
    lists += [("a special token", entry.get("ids")) for entry in tokens.values() if isinstance(entry, Mapping)]
    for name, items in lists:
        if isinstance(items, Sized) and len(items) > MOST_PARTS:
            yield f"{name} has {len(items)} items, more than {MOST_PARTS}"
    for name in ("single", "pair"):
        template = node.get(name)
        for item in template[:MOST_PARTS] if isinstance(template, list) else ():
            token = item.get("SpecialToken") if isinstance(item, Mapping) else None
            text = token.get("id") if isinstance(token, Mapping) else None
            if isinstance(text, str) and text not in tokens:
                yield f"{name} has the token {shorten(text)!r}, which is not among its special_tokens"


def _growth(node: Mapping[str, Any]) -> int:
    """Return the largest factor by which a replacement lengthens a text; a pattern can match before each character."""
    text = node.get("content")
    if node.get("type") != "Replace" or not isinstance(text, str):
        return 1
    return max(1, len(text) if _is_literal(node) else len(text) + 1)


def _is_literal(node: Mapping[str, Any]) -> bool:
    pattern = node.get("pattern")
    return isinstance(pattern, Mapping) and bool(pattern.get("String"))


def charsmap_fault(table: bytes) -> str | None:
    """Return the fault of a compiled replacement table; None if all of its links stay inside the table.

    The libraries follow these links without a check. A table consists of the size of a trie, the trie (32-bit units of
    a double array), and replacements that end with a zero byte.

    Args:
        table: `precompiled_charsmap` of a SentencePiece model.

    Source: the format of Darts-clone, github.com/s-yata/darts-clone, darts.h.
    """
    size = int.from_bytes(table[:4], "little")
    texts = table[4 + size :]
    if len(table) < 4 or size % 1024 or not 0 < size <= len(table) - 4 or not texts.endswith(b"\0"):
        return "its replacement table is damaged"
    if max(map(len, texts.split(b"\0"))) > LONGEST_REPLACEMENT:
        return f"its replacement table has an entry of more than {LONGEST_REPLACEMENT} bytes"
    units = np.frombuffer(table, "<u4", count=size // 4, offset=4).astype(np.int64)
    offset = (units >> 10) << ((units & 512) >> 6)
    inner = units >> 31 == 0
    places = (np.arange(len(units)) ^ offset)[inner]
    if ((places | 255) >= len(units)).any():
        return "its replacement table is damaged"
    leaves = units[places[(units[inner] & 256) != 0]] & (2**31 - 1)
    return "its replacement table is damaged" if (leaves >= len(texts)).any() else None


LONGEST_PATTERN, MOST_REPEATS, MOST_OPEN_REPEATS = 2000, 1000, 4

_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d*)(,?)(\d*)\})[?+]?")
# Allowed groups: they take no more time than their content. All others recurse, look things up or run code.
_GROUP = re.compile(r"\((?:\?(?:[imsx-]*:|=|!|<=|<!|>|<\w+>|[imsx-]+(?=\))))?")


def pattern_fault(pattern: str) -> str | None:
    """Return the reason why a pattern may take forever on some text; None if its time is at most polynomial.

    A repeated group may contain no repetition and no alternatives, since these can match in exponentially many ways.
    Patterns of real tokenizers never need this.

    Args:
        pattern: regular expression in Oniguruma syntax.
    """
    if len(pattern) > LONGEST_PATTERN:
        return f"has {len(pattern)} characters, more than {LONGEST_PATTERN}"
    return _PatternChecker(pattern).fault()


class _PatternChecker:
    """Scanner that finds patterns with exponential running time, by the repetitions inside each open group."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.position = 0
        self.varies = [False]
        self.repeats = [0]
        self.most = [0]

    def fault(self) -> str | None:
        """Scan the pattern and return its first fault, or None."""
        while self.position < len(self.pattern):
            item_fault = self._check_item()
            if item_fault is not None:
                return item_fault
        if len(self.varies) > 1:
            return "opens a group that it does not close"
        if max(self.most[0], self.repeats[0]) > MOST_OPEN_REPEATS:
            return f"has more than {MOST_OPEN_REPEATS} unbounded repetitions in one alternative"
        return None

    def _check_item(self) -> str | None:
        """Scan one character, class or bracket with its quantifier; return its fault, or None."""
        sign = self.pattern[self.position]
        if sign == "(":
            return self._open()
        if sign == "|":
            self.varies[-1] = True
            self.most[-1], self.repeats[-1] = max(self.most[-1], self.repeats[-1]), 0
            self.position += 1
            return None
        varies, inner = False, 0
        if sign == ")":
            if len(self.varies) == 1:
                return "closes a group that it does not open"
            varies, inner = self.varies.pop(), max(self.most.pop(), self.repeats.pop())
            self.varies[-1] |= varies
            self.repeats[-1] += inner
            self.position += 1
        elif sign == "[":
            self._class()
        elif sign == "\\":
            following = self.pattern[self.position + 1 : self.position + 2]
            if following.isdigit() or following in ("k", "g"):
                return "has a backreference"
            self.position += 2
        else:
            self.position += 1
        return self._quantifier(is_group=sign == ")", varies=varies)

    def _open(self) -> str | None:
        group = _GROUP.match(self.pattern, self.position)
        assert group is not None, "an opening bracket begins a group"
        if self.pattern[group.end() : group.end() + 1] in ("?", "*"):
            return "has a group of an unsupported kind, such as a conditional or a callout"
        self.position = group.end()
        self.varies.append(False)
        self.repeats.append(0)
        self.most.append(0)
        return None

    def _class(self) -> None:
        depth = 0
        while self.position < len(self.pattern):
            sign = self.pattern[self.position]
            depth += {"[": 1, "]": -1}.get(sign, 0)
            self.position += 2 if sign == "\\" else 1
            if depth == 0:
                return

    def _quantifier(self, *, is_group: bool, varies: bool) -> str | None:
        quantifier = _QUANTIFIER.match(self.pattern, self.position)
        if quantifier is None or quantifier[0] == "{}":
            return None
        self.position = quantifier.end()
        if self.pattern[self.position : self.position + 1] in ("*", "+", "?") or _QUANTIFIER.match(
            self.pattern, self.position
        ):
            return "repeats a repetition"
        least, comma, most = quantifier[1], quantifier[2], quantifier[3]
        if quantifier[0][0] == "{" and any(len(count) > 4 or int(count or 0) > MOST_REPEATS for count in (least, most)):
            return f"repeats a group or character more than {MOST_REPEATS} times"
        if is_group and varies and quantifier[0][0] != "?":
            return "repeats a group of variable length"
        is_open = quantifier[0][0] in "*+" or (comma == "," and not most)
        self.repeats[-1] += is_open
        self.varies[-1] |= is_open or quantifier[0][0] == "?" or comma == ","
        return None
