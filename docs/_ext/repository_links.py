"""Links that lead out of docs/: on GitHub to a file of the repository, on the site to its page or its name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import SphinxError

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
PAGES = {"CONTRIBUTING.md": "explanation/contributing.md", "README.md": "start/index.md"}
"""Files of the repository that are pages of the site."""


def replace_links(app: Sphinx, name: str, content: list[str]) -> None:
    """Replace, in the text of a page, the links that lead out of the folder of the site."""
    docs = Path(app.srcdir).resolve()
    folder = (docs / name).parent

    def replace_link(match: re.Match[str]) -> str:
        text, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        path = (folder / target).resolve()
        if path.is_relative_to(docs):
            return match.group()
        if not path.exists():
            raise SphinxError(f"{name}: the link to {target} leads nowhere")
        inside = path.relative_to(docs.parent).as_posix()
        if inside in PAGES:
            return f"[{text}](/{PAGES[inside]}{anchor})"
        return f"`{inside}`" if inside in text else f"{text} (`{inside}`)"

    content[0] = LINK.sub(replace_link, content[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Look at each page before it is parsed."""
    app.connect("source-read", replace_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
