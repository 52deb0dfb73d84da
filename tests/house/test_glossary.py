"""The glossary of the site: every word has a sentence, a lesson, and a file that is there and in which it lives."""

from __future__ import annotations

import tomllib

import pytest

from tests.house.source import ROOT

WORDS = tomllib.loads((ROOT / "docs" / "reference" / "glossary.toml").read_text("utf-8"))


@pytest.mark.parametrize("word", WORDS)
def test_every_word_has_a_sentence_a_lesson_and_a_file(word: str) -> None:
    entry = WORDS[word]
    assert set(entry) == {"is", "file", "lesson"}
    assert entry["is"].endswith(".") and ". " not in entry["is"], "one sentence"
    assert entry["lesson"] in range(1, 13)
    text = (ROOT / entry["file"]).read_text("utf-8").lower()
    stem = word.lower().removesuffix("s").split("-")[-1].split()[-1].removesuffix("ing").removesuffix("ion")
    assert stem in text, f"{entry['file']} says nothing of {word}"
