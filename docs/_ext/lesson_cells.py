"""Cells of a lesson: a solution's line repeats the title of its exercise, and long lines of an output wrap."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import SphinxError

TITLE = re.compile(r"(\d+ · .+?)(?: \([^()]*\))?\.?$")
OUTPUT = re.compile(
    r'(<div class="output stream [^>]*><div class="highlight"><pre>)(?:<span></span>)?(.*?)(?=</pre>)', re.S
)
# The indentation of a line, and the label that stands in front of an entry, such as "  should be   ".
LABEL = re.compile(r"( *)(\w[\w ]{0,12}? {2,}(?=\S))?")


def name_solutions(app: Sphinx, tree: nodes.document) -> None:
    """Name each hidden solution after the exercise above it."""
    exercise = ""
    for node in tree.findall(lambda node: isinstance(node, nodes.strong | nodes.container)):
        if isinstance(node, nodes.strong):
            match = TITLE.match(" ".join(node.astext().split()))
            exercise = match.group(1) if match else exercise
        elif "tag_solution" in node["classes"]:
            if not exercise:
                raise SphinxError(f"{app.env.docname}: a solution has no exercise '**1 · Title (minutes).**' above it")
            node["prompt_show"], node["prompt_hide"] = f"Show solution {exercise}", f"Hide solution {exercise}"


def wrap_line(line: str) -> str:
    """Return a line of an output that continues, where it wraps, below the text after its label, or is indented."""
    indentation, label = LABEL.findall(line)[0]
    columns = len(indentation + label) if label else len(indentation) + 2
    return f'<span class="line" style="--label: {columns}ch">{line}\n</span>'


def wrap_outputs(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _tree: object) -> None:
    """Let the lines of each output wrap, so that reports fit into their boxes on every screen."""

    def wrap(match: re.Match[str]) -> str:
        return match.group(1) + "".join(map(wrap_line, match.group(2).removesuffix("\n").split("\n")))

    context["body"] = OUTPUT.sub(wrap, context.get("body", ""))


def setup(app: Sphinx) -> dict[str, bool]:
    """Look at each page once it is parsed, and again when it is written."""
    app.connect("doctree-read", name_solutions)
    app.connect("html-page-context", wrap_outputs)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
