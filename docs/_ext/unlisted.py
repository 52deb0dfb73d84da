"""Guides that no list of docs/guides/index.md names are listed at its end, so that a new page is never lost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

INDEX = "guides/index"


def list_others(app: Sphinx, name: str, content: list[str]) -> None:
    """Append what the index of the guides does not name."""
    if name != INDEX:
        return
    listed = set(re.findall(r"^(?:\.\./)?([\w/-]+)$", content[0], re.MULTILINE))
    pages = sorted(path.stem for path in (Path(app.srcdir) / "guides").glob("*.md"))
    others = [page for page in pages if page not in listed | {"index", "run-directory"}]
    if others:
        content[0] += "\n".join(["\n```{toctree}", ":caption: More", ":maxdepth: 1", "", *others, "```", ""])


def setup(app: Sphinx) -> dict[str, Any]:
    """Look at the index before it is parsed."""
    app.connect("source-read", list_others)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
