"""Escape docstrings for Sphinx: they are plain text, and only `code` in backticks is markup."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

CODE = re.compile(r"(`[^`\n]*(?:\n[^`\n]*)?`)")


def escape(text: str) -> str:
    """Return reStructuredText that shows a text unchanged; code stays code and keeps its backslashes."""
    pieces = CODE.split(text)
    plain = [re.sub(r"([\\*|])|(?<=\w)(_)(?!\w)", r"\\\1\2", piece) for piece in pieces[::2]]
    code = [f"``{' '.join(piece.strip('`').split())}``" if piece.strip("`") else piece for piece in pieces[1::2]]
    return "".join(piece for pair in zip(plain, [*code, ""], strict=True) for piece in pair)


def escape_docstring(_app: Sphinx, _what: str, _name: str, _thing: object, _options: object, lines: list[str]) -> None:
    """Escape a docstring before napoleon reads it."""
    lines[:] = escape("\n".join(lines)).split("\n")


SIGNATURE = re.compile(r'<dt class="sig .*?</dt>', re.DOTALL)
SPANS = {"<dl>": '<span class="lines">', "</dl>": "</span>", "<dd>": '<span class="line">', "</dd>": "</span>"}


def without_lists(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _tree: object) -> None:
    """Show the parameters of a long signature as lines instead of a definition list without terms."""

    def spans(match: re.Match[str]) -> str:
        return re.sub("</?d[ld]>", lambda tag: SPANS[tag.group()], match.group())

    context["body"] = SIGNATURE.sub(spans, context.get("body", ""))


def setup(app: Sphinx) -> None:
    """Run before napoleon, and again when a page is written."""
    app.connect("html-page-context", without_lists)
    app.connect("autodoc-process-docstring", escape_docstring, priority=100)
