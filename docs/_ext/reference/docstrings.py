"""Docstrings are plain text with `code` in backticks; here their other signs are kept from meaning something."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

CODE = re.compile(r"(`[^`\n]*(?:\n[^`\n]*)?`)")


def escape(text: str) -> str:
    """Return reStructuredText that shows a text as it is; code stays code, and keeps its backslashes."""
    pieces = CODE.split(text)
    plain = [re.sub(r"([\\*|])|(?<=\w)(_)(?!\w)", r"\\\1\2", piece) for piece in pieces[::2]]
    code = [f"``{' '.join(piece.strip('`').split())}``" if piece.strip("`") else piece for piece in pieces[1::2]]
    return "".join(part for pair in zip(plain, [*code, ""], strict=True) for part in pair)


def escape_docstring(_app: Sphinx, _what: str, _name: str, _thing: object, _options: object, lines: list[str]) -> None:
    """Escape a docstring before napoleon reads it."""
    lines[:] = escape("\n".join(lines)).split("\n")


def setup(app: Sphinx) -> None:
    """Be asked before napoleon is."""
    app.connect("autodoc-process-docstring", escape_docstring, priority=100)
