"""Tables: an empty head of a column gets a word for those who hear the page."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def name_empty_heads(_app: Sphinx, tree: nodes.document) -> None:
    """Give each empty cell in the head of a table a name that is not shown."""
    for head in tree.findall(nodes.thead):
        for entry in head.findall(nodes.entry):
            if not entry.astext().strip():
                entry += nodes.paragraph("", "", nodes.inline("", "row", classes=["visually-hidden"]))


def setup(app: Sphinx) -> dict[str, Any]:
    """Look at each page once it is parsed."""
    app.connect("doctree-read", name_empty_heads)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
