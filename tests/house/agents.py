"""Write AGENTS.md, the instructions for coding agents, from CONTRIBUTING.md: python -m tests.house.agents."""

from __future__ import annotations

import re

from tests.house.source import ROOT

AGENTS, CONTRIBUTING = ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md"
HEADER = """# Instructions for coding agents

clearhead is a Python library and command-line program for Transformers: build, train, run, convert, explain.

This file is generated from CONTRIBUTING.md by `python -m tests.house.agents`; change that file instead.
Its other sections are the rules for code, text and tests: read them before you write.
"""
SECTIONS = ("Read first", "Build and test", "Prove a change")


def read_sections(text: str) -> dict[str, str]:
    """Return the text below each heading of the second level."""
    pieces = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], (piece.strip() for piece in pieces[2::2]), strict=True))


def write_instructions(contributing: str) -> str:
    """Return the text of AGENTS.md.

    Args:
        contributing: the text of CONTRIBUTING.md.

    Raises:
        KeyError: CONTRIBUTING.md lacks one of `SECTIONS`.
    """
    sections = read_sections(contributing)
    return "\n".join([HEADER, *(f"## {title}\n\n{sections[title]}\n" for title in SECTIONS)])


if __name__ == "__main__":
    AGENTS.write_text(write_instructions(CONTRIBUTING.read_text("utf-8")), encoding="utf-8")
