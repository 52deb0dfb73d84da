"""Write llms.txt into the site: each page with its link and first sentence, for language models (llmstxt.org)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

FILE = "llms.txt"


def list_pages(app: Sphinx, name: str) -> list[str]:
    """Return a page, then all pages below it in the order of their tables of contents."""
    below = app.env.toctree_includes.get(name, [])
    return [name, *(page for child in below for page in list_pages(app, child))]


def first_sentence(app: Sphinx, name: str) -> str:
    """Return the first sentence of a page, or an empty string for a page without a paragraph."""
    paragraph = app.env.get_doctree(name).next_node(nodes.paragraph)
    text = " ".join(paragraph.astext().split()) if paragraph is not None else ""
    return text.split(". ")[0].rstrip(".:")


def describe_page(app: Sphinx, name: str) -> str:
    """Return the entry of one page."""
    text = first_sentence(app, name)
    return f"- [{app.env.titles[name].astext()}]({name}.html)" + (f": {text}" if text else "")


def write_pages(app: Sphinx, error: Exception | None) -> None:
    """Write the file after a build of HTML pages that succeeded."""
    if error is not None or app.builder.format != "html":
        return
    root = app.config.root_doc
    lines = [f"# {app.config.project}", "", f"> {first_sentence(app, root)}."]
    for section in app.env.toctree_includes.get(root, []):
        lines += ["", f"## {app.env.titles[section].astext()}", ""]
        lines += [describe_page(app, name) for name in dict.fromkeys(list_pages(app, section))]
    (Path(app.outdir) / FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the file when everything else is built."""
    app.connect("build-finished", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
