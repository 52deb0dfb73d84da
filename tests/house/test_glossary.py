"""The glossary of the site: every word has a sentence, a lesson and an existing file."""

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
    assert entry["lesson"] in range(1, 14)
    assert (ROOT / entry["file"]).is_file()
