"""Solutions of a lesson: the line that opens one repeats the number and the title of its exercise."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import SphinxError

TITLE = re.compile(r"(\d+ · .+?)(?: \([^()]*\))?\.?$")


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


def setup(app: Sphinx) -> dict[str, bool]:
    """Look at each page once it is parsed."""
    app.connect("doctree-read", name_solutions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
