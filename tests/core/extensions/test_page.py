"""The page "Add a custom module" shows the code of the examples, which are short."""

from __future__ import annotations

from textwrap import indent

from tests.house.source import ROOT
from tests.house.test_documents import blocks

PAGE = ROOT / "docs" / "guides" / "add-a-part.md"
FILES = [ROOT / "examples" / name for name in ("gated_recurrence.py", "differential_attention.py")]


def test_its_code_is_that_of_the_examples() -> None:
    shown = [text for text in blocks(PAGE, "python") if "ch.load(" not in text]
    code = "\n".join(path.read_text("utf-8") for path in FILES)
    assert len(shown) >= 4
    for text in shown:
        assert any(f"\n{indent(text, ' ' * level)}" in code for level in (0, 4, 8)), text


def test_the_examples_have_at_most_80_lines() -> None:
    assert all(len(path.read_text("utf-8").splitlines()) <= 80 for path in FILES)
