"""Pages of the reference that are made from the code when the site is built: a directive for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from reference import commands, docstrings, glossary, hook_points, public_names, run_file, spec_nodes

Lines = Callable[[str], Iterator[str]]


def directive(lines: Lines) -> type[SphinxDirective]:
    """Return a directive that stands for lines of Markdown, which are made from its argument."""

    class Made(SphinxDirective):
        optional_arguments = 1
        final_argument_whitespace = True

        def run(self) -> list[nodes.Node]:
            argument = self.arguments[0] if self.arguments else ""
            return self.parse_text_to_nodes("\n".join(lines(argument)), allow_section_headings=True)

    return Made


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives, and what makes docstrings readable to Sphinx."""
    made: dict[str, Lines] = {
        "commands": commands.lines,
        "glossary-of-words": glossary.lines,
        "hook-points": hook_points.lines,
        "public-names": public_names.lines,
        "run-file": run_file.lines,
        "spec-nodes": spec_nodes.lines,
    }
    for name, lines in made.items():
        app.add_directive(name, directive(lines))
    docstrings.setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
