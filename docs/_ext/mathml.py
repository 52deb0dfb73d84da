"""Formulas as MathML, written when the site is built: no script, no font and no network is needed to read them."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.errors import SphinxError


def formula(node: nodes.Element, *, as_block: bool) -> str:
    """Return a formula in LaTeX as MathML.

    Raises:
        SphinxError: the formula is not understood.
    """
    text = node.astext()
    try:
        return str(latex2mathml.tex2mathml(text, as_block=as_block))
    except MathError as error:
        raise SphinxError(f"{node.source}:{node.line}: the formula {text!r} is not understood: {error}") from None


def visit_math(writer: Any, node: nodes.Element) -> None:
    """Write a formula inside a line."""
    writer.body.append(formula(node, as_block=False))
    raise nodes.SkipNode


def visit_displaymath(writer: Any, node: nodes.Element) -> None:
    """Write a formula that stands alone, with its number if it has one."""
    writer.body.append(writer.starttag(node, "div", CLASS="formula", tabindex="0", role="group"))
    writer.body.append(formula(node, as_block=True))
    if node["number"]:
        writer.body.append(f'<span class="number">({node["number"]})</span>')
    writer.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer of formulas."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_displaymath, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
