"""Tables of contents from lists: a line "- [Title](page.md): purpose" of an index page adds its page to the site."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

INDEXES = ("guides/index", "reference/index")
ENTRY = re.compile(r"^- \[[^\]]+\]\((\S+)\.md\): ", re.MULTILINE)


def add_contents(_app: Sphinx, name: str, content: list[str]) -> None:
    """Append a hidden table of contents for each section of an index page, under the section's title."""
    if name not in INDEXES:
        return
    for section in content[0].split("\n## "):
        pages = ENTRY.findall(section)
        caption = [] if section.startswith("#") else [f":caption: {section.partition(chr(10))[0]}"]
        content[0] += "\n".join(["\n```{toctree}", ":hidden:", *caption, "", *pages, "```", ""]) if pages else ""


def setup(app: Sphinx) -> dict[str, bool]:
    """Look at the index pages before they are parsed."""
    app.connect("source-read", add_contents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
