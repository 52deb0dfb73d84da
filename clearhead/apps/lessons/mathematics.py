"""Formulas of a lesson as plain text for a terminal."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pylatexenc.latex2text import LatexNodes2Text

_DISPLAYED: Final = re.compile(r"^\$\$(.+?)\$\$$", re.MULTILINE | re.DOTALL)
_INLINE: Final = re.compile(r"\$([^$\n]+)\$")
# A superscript or subscript of several characters, with one level of braces inside.
_RAISED: Final = re.compile(r"([\^_])\{((?:[^{}]|\{[^{}]*\}){2,})\}")
_SPACED: Final = re.compile(
    r"\\(leftarrow|mapsto|mid|cdot|approx|in|beta|theta|alpha|gamma|varepsilon|top|pi|ldots|log|ln)(?![a-z])"
)
# Brackets around a single word, and spaces before closing signs, are not needed.
_SHORTER: Final = [
    (re.compile(pattern), shorter)
    for pattern, shorter in (
        (r" (?=[),.^;])|(?<=\() ", ""),
        (r"([\^_√])\((\w+)\)", r"\1\2"),
        (r"\((√?\w{1,3})\) / ", r"\1 / "),
        (r" / \((√?\w{1,3})\)", r" / \1"),
    )
]
_POWER: Final = re.compile(r"\^([0-9]+|⊤)")
_SUPERSCRIPTS: Final = str.maketrans("0123456789⊤", "⁰¹²³⁴⁵⁶⁷⁸⁹ᵀ")


def replace_formulas(markdown: str) -> str:
    """Return Markdown with plain text in place of TeX; displayed formulas become code blocks.

    Fractions and roots get brackets: "(x - mean(x)) / √(var(x) + ε)".
    """
    text = _DISPLAYED.sub(lambda match: f"```text\n{formula_text(match[1])}\n```", markdown)
    return _INLINE.sub(lambda match: formula_text(match[1]), text)


def formula_text(formula: str) -> str:
    """Return a TeX formula as one line of text."""
    bracketed = _RAISED.sub(r"\1{(\2)}", formula)
    # A command swallows the space after it, which the text needs.
    text = " ".join(_converter().latex_to_text(_SPACED.sub(r"\\\1{} ", bracketed)).split())
    for pattern, shorter in _SHORTER:
        text = pattern.sub(shorter, text)
    return _POWER.sub(lambda match: match[1].translate(_SUPERSCRIPTS), text)


@functools.cache
def _converter() -> LatexNodes2Text:
    """Return the converter of pylatexenc with brackets around the parts of a fraction."""
    from pylatexenc.latex2text import LatexNodes2Text, MacroTextSpec, get_default_latex_context_db

    context = get_default_latex_context_db()
    fraction = MacroTextSpec("frac", simplify_repl=r"(%s) / (%s)")
    context.add_context_category("lessons", macros=[fraction], prepend=True)
    return LatexNodes2Text(latex_context=context)
