"""Tokenizer files that would take all time or memory, or read outside of their tables, are refused before they run."""

from __future__ import annotations

import base64
import random
from typing import Any

import pytest

from clearhead.errors import InputError
from clearhead.text.backend import DocumentBackend
from clearhead.text.sentencepiece import _replacement_tables, check_tables
from clearhead.text.tokenizer_checks import charsmap_fault, check_document
from tests.hf.tokenizer_folders import pieces_model

MODEL = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"}


def replace(pattern: object, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*parts: object) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(parts)}


@pytest.mark.parametrize(
    ("place", "part", "words"),
    [
        ("normalizer", sequence(*[replace({"String": "a"}, "aa")] * 11), "2048 times as long"),
        ("normalizer", sequence(*[replace({"Regex": ""}, "a")] * 11), "2048 times as long"),
        ("normalizer", replace({"String": "a"}, "b" * 65), "content has 65 characters"),
        ("normalizer", replace({"Regex": "(a+)+"}, "b"), "may take forever"),
        ("normalizer", sequence(sequence({"type": "Surprise"})), "'Surprise', which is not supported"),
        ("normalizer", sequence(*[{"type": "NFC"}] * 70), "71 parts"),
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
        ("model", {"type": "Other"}, "the model is of a kind"),
    ],
)
def test_a_part_out_of_bounds_is_named(place: str, part: object, words: str) -> None:
    check_document({"model": MODEL}, "t.json")
    with pytest.raises(InputError, match=f"^t.json: .*{words}"):
        check_document({"model": MODEL, place: part}, "t.json")


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
    place = content.index(table)
    with pytest.raises(InputError, match="table of replacements is damaged"):
        check_tables(content[:place] + outside + content[place + len(table) :], "m.model")


def test_any_bytes_are_walked_through() -> None:
    draw = random.Random(5)
    for _ in range(300):
        list(_replacement_tables(draw.randbytes(draw.randrange(40))))


def test_a_panic_of_the_library_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As pyo3 names it."""

    class Panics:
        def __getattr__(self, name: str) -> Any:
            def call(*values: object, **named: object) -> None:
                raise PanicException("index out of bounds")

            return call

    backend = DocumentBackend({"model": MODEL, "version": "1.0", "added_tokens": []})
    backend._backend = Panics()
    for use in (lambda: backend.encode_batch(["a"]), lambda: backend.decode([0]), backend.vocabulary):
        with pytest.raises(InputError, match=r"cannot run the tokenizer\.json: index out of bounds"):
            use()
