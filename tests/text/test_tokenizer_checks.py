"""Tokenizer files that could use unlimited time or memory, or read outside their tables, are refused."""

from __future__ import annotations

import base64
import random
from pathlib import Path
from typing import Any

import pytest

from clearhead.base.errors import InputError
from clearhead.text import tokenizer_checks
from clearhead.text.backend import DocumentBackend
from clearhead.text.sentencepiece import _replacement_tables, check_tables, load_pieces
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_checks import charsmap_fault, check_document, pattern_fault
from tests.checkpoints.hf.tokenizer_folders import pieces_model, write

MODEL = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"}


def replace(pattern: object, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def template(single: list[Any] | None = None, ids: int = 1, tokens: int = 1) -> dict[str, Any]:
    """A post-processor with a special token in front of a text."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    entries = {f"<{number}>": {"id": f"<{number}>", "ids": [1] * ids, "tokens": [""] * ids} for number in range(tokens)}
    return {"type": "TemplateProcessing", "single": [*(single or []), text], "pair": [text], "special_tokens": entries}


def token(name: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": 0}}


def sequence(*parts: object) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(parts)}


@pytest.mark.parametrize(
    ("stage", "node", "words"),
    [
        ("normalizer", sequence(*[replace({"String": "a"}, "aa")] * 11), "2048 times as long"),
        ("normalizer", sequence(*[replace({"Regex": ""}, "a")] * 11), "2048 times as long"),
        ("normalizer", replace({"String": "a"}, "b" * 65), "content has 65 characters"),
        ("normalizer", replace({"Regex": "(a+)+"}, "b"), "may take forever"),
        ("normalizer", sequence(sequence({"type": "Surprise"})), "'Surprise', which is not supported"),
        ("normalizer", sequence(*[{"type": "NFC"}] * 70), "71 components"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "damaged"),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "length is 0"),
        (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": "(a|b)*"}, "behavior": "Isolated"},
            "may take forever",
        ),
        ("decoder", {"type": "WordPiece", "prefix": "#" * 1000}, "prefix has 1000 characters"),
        ("decoder", [], "which is not supported"),
        ("model", {**MODEL, "type": "WordPiece", "max_input_chars_per_word": 10**9}, "max_input_chars_per_word"),
        ("model", {"type": "Other"}, "the kind of the model must be"),
        ("model", {"type": "WordLevel", "vocab": range(2**20 + 1)}, "1,048,577 entries are too many for a vocabulary"),
        ("model", {"type": "BPE", "merges": range(2**20 + 1)}, "1,048,577 merges are too many for a vocabulary"),
        ("post_processor", template([token("<0>")] * 10**6), "single has 1000001 items, more than 64"),
        ("post_processor", template([token("<0>")], ids=65), "a special token has 65 items, more than 64"),
        ("post_processor", template(tokens=65), "special_tokens has 65 items, more than 64"),
        (
            "post_processor",
            template([token("<1>")]),
            "single has the token '<1>', which is not among its special_tokens",
        ),
        ("post_processor", {"type": "Sequence", "processors": [{"type": "ByteLevel"}] * 70}, "71 components"),
        ("post_processor", {"type": "Surprise"}, "'Surprise', which is not supported"),
    ],
)
def test_a_part_out_of_bounds_is_named(stage: str, node: object, words: str) -> None:
    check_document({"model": MODEL, "post_processor": template([token("<0>")])}, "t.json")
    with pytest.raises(InputError, match=f"^t.json: .*{words}"):
        check_document({"model": MODEL, stage: node}, "t.json")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", {"added_tokens": [{}] * 65_537, "model": MODEL}, "65,537 added tokens are too many"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": dict.fromkeys(map(str, range(65_537)))},
            "65,537 added tokens",
        ),
        ("vocab.json", dict.fromkeys(map(str, range(2**20 + 1)), 0), "1,048,577 entries are too many"),
        ("merges.txt", "a b\n" * (2**20 + 1), "1,048,577 merges are too many"),
        ("vocab.txt", "a\n" * (2**20 + 1), "1,048,577 entries are too many"),
    ],
)
def test_a_vocabulary_that_no_model_has(name: str, content: object, words: str, tmp_path: Path) -> None:
    kind = "BertTokenizer" if name == "vocab.txt" else "GPT2Tokenizer"
    files = {"vocab.json": {"a": 0}, "merges.txt": "", "tokenizer_config.json": {"tokenizer_class": kind}}
    write(tmp_path, {**files, name: content})
    with pytest.raises(InputError, match=rf"{name}: {words}"):
        Tokenizer.load(tmp_path)


def test_a_model_of_pieces_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tokenizer_checks.MOST, "pieces", 100)
    with pytest.raises(InputError, match=r"m\.model: 173 pieces are too many for a vocabulary"):
        load_pieces(pieces_model("bpe"), "m.model")
    with pytest.raises(InputError, match=r"m\.model: 33554433 bytes are too many for a SentencePiece model"):
        load_pieces(b"\n" * (2**25 + 1), "m.model")


def test_links_of_a_table_of_replacements_stay_inside() -> None:
    (table,) = _replacement_tables(pieces_model("unigram"))
    assert charsmap_fault(table) is None
    normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    check_document({"model": MODEL, "normalizer": normalizer}, "t.json")
    # The first unit is the root, whose children are then beyond the end.
    outside = table[:4] + ((2**21 - 1) << 10).to_bytes(4, "little") + table[8:]
    assert charsmap_fault(outside) is not None
    assert charsmap_fault(table[:-3]) is not None and charsmap_fault(b"") is not None
    long = table + b"x" * 300 + b"\0"
    assert "more than 256 bytes" in str(charsmap_fault(long))
    content = pieces_model("unigram")
    offset = content.index(table)
    with pytest.raises(InputError, match="replacement table is damaged"):
        check_tables(content[:offset] + outside + content[offset + len(table) :], "m.model")


def test_any_bytes_are_walked_through() -> None:
    draw = random.Random(5)
    for _ in range(300):
        list(_replacement_tables(draw.randbytes(draw.randrange(40))))


def test_a_panic_of_the_library_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """Exception with the name that pyo3 uses for a panic."""

    class Panics:
        def __getattr__(self, name: str) -> Any:
            def call(*values: object, **named: object) -> None:
                raise PanicException("index out of bounds")

            return call

    backend = DocumentBackend({"model": MODEL, "version": "1.0", "added_tokens": []})
    backend._backend = Panics()
    for use in (lambda: backend.encode_batch(["a"]), lambda: backend.decode([0]), backend.vocabulary):
        with pytest.raises(InputError, match=r"cannot run this tokenizer\.json: index out of bounds"):
            use()


HONEST = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lm}\p{M}]+(?i:'s|'t|'re)?|[\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+""",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"\d{1,3}(?=(?:\d{3})*\b)",
    r"(?<=\S)\s(?=\S)",
    r" {2,}",
]
EXPLOSIVE = [
    (r"(a+)+$", "variable length"),
    (r"(a|a)*b", "variable length"),
    (r"(?:a*)*", "variable length"),
    (r"((a{1,3})){5}", "variable length"),
    (r"(a)\1", "backreference"),
    (r"\g<0>", "backreference"),
    (r"(?R)", "unsupported kind"),
    (r"(*FAIL)", "unsupported kind"),
    (r"a{1000000}", "more than 1000 times"),
    (r"a{100}{100}", "repeats a repetition"),
    (r"a*b*a*b*a*c", "unbounded repetitions"),
    ("x" * 3000, "characters"),
    ("(a", "does not close"),
    ("a)", "does not open"),
]


@pytest.mark.parametrize("pattern", HONEST)
def test_honest_patterns_pass(pattern: str) -> None:
    assert pattern_fault(pattern) is None


@pytest.mark.parametrize(("pattern", "words"), EXPLOSIVE)
def test_a_pattern_that_may_take_forever_is_named(pattern: str, words: str) -> None:
    assert words in str(pattern_fault(pattern))
