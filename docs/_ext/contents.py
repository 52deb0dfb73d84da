"""Tables of contents from lists: a line "- [Title](page.md): purpose" of an index page adds its page to the site."""

from __future__ import annotations

import re
from typing import Any

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


def name_toggles(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _tree: object) -> None:
    """Name the buttons of the navigation that open the pages below a page; the theme gives them an icon alone."""
    generate = context.get("generate_toctree_html")

    def generate_named(*arguments: Any, **options: Any) -> str:
        return str(generate(*arguments, **options)).replace("<summary>", '<summary aria-label="Pages below">')

    if generate is not None:
        context["generate_toctree_html"] = generate_named


def setup(app: Sphinx) -> dict[str, bool]:
    """Look at the index pages before they are parsed, and at the navigation after the theme has made it."""
    app.connect("source-read", add_contents)
    app.connect("html-page-context", name_toggles, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
