"""Directives for the pages of the reference that are generated from the code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from reference import commands, docstrings, glossary, hook_points, public_names, run_file, spec_nodes

Lines = Callable[[str], Iterator[str]]


def directive(lines: Lines) -> type[SphinxDirective]:
    """Return a directive that inserts Markdown, generated from its argument."""

    class GeneratedPage(SphinxDirective):
        optional_arguments = 1
        final_argument_whitespace = True

        def run(self) -> list[nodes.Node]:
            argument = self.arguments[0] if self.arguments else ""
            return self.parse_text_to_nodes("\n".join(lines(argument)), allow_section_headings=True)

    return GeneratedPage


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives, write the pages of the commands, and escape docstrings."""
    generators: dict[str, Lines] = {
        "commands": commands.lines,
        "glossary-of-words": glossary.lines,
        "hook-points": hook_points.lines,
        "public-names": public_names.lines,
        "run-file": run_file.lines,
        "spec-nodes": spec_nodes.lines,
    }
    for name, lines in generators.items():
        app.add_directive(name, directive(lines))
    app.connect("builder-inited", commands.write_pages)
    docstrings.setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
