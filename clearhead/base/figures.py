"""Shared colours, font and helpers for pictures, drawn without a display."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Float
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath

from clearhead.base.errors import InputError
from clearhead.base.files import replacing

FONT = FontProperties(family="DejaVu Sans", size=10)
INK, FAINT, EDGE, GRID = "#1f2933", "#8a94a0", "#c5ccd3", "#e4e8ec"
# Colours of lines, in the order of use.
COLOURS = ("#2a78b8", "#d95f30", "#1f9e77", "#8e63b5", "#b8860b", "#c8557f", "#4f6272", "#7a9a2e")

# Widths of lines: for single values, and for their sums.
THIN, THICK = 0.8, 2.2
LONGEST_NAME: Final = 40
"""Maximum number of characters of a name in a legend."""


def new_figure(width: float, height: float, title: str, lines: Sequence[str] = (), *, left: float = 0.25) -> Figure:
    """Return a white figure with a title.

    Args:
        width, height: the size in inches.
        title: the title at the top.
        lines: lines of smaller text below the title.
        left: the inches between the left edge and the text.
    """
    # Avoid pyplot, which keeps global state.
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    x = left / width
    figure.text(x, 1 - 0.38 / height, title, fontsize=13, fontweight="bold", color=INK, va="center", parse_math=False)
    for number, line in enumerate(lines):
        y = 1 - (0.66 + 0.2 * number) / height
        figure.text(x, y, line, fontsize=9, color=FAINT, va="center", parse_math=False)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as .png or .svg; missing folders are created.

    Raises:
        InputError: the name has another ending, or the file cannot be written.
    """
    kind = path.suffix.lower()
    if kind not in (".png", ".svg"):
        raise InputError(f"a picture must be a .png or .svg file, got {path}: use one of these endings")
    # Equal figures make equal files: no date, no random names.
    options: dict[str, Any] = {"metadata": {"Date": None}} if kind == ".svg" else {}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, rc_context({"svg.hashsalt": "clearhead"}):
            figure.savefig(temporary, format=kind[1:], **options)
    except OSError as error:
        raise InputError(f"the picture {path} cannot be written: {error.strerror}") from None


def drawable(text: str) -> bool:
    """Return whether the font of the pictures has every character of a text."""
    return set(map(ord, text)) <= set(get_font(findfont(FONT)).get_charmap())


def label_text(text: str, longest: int) -> str:
    """Return a text as a label: cut if it is long, and escaped if the font lacks a character or it is not printable.

    Args:
        text: any text, such as a token.
        longest: the maximum number of characters, at least 1.
    """
    if text.isspace():
        text = text.replace(" ", "␣")
    shown = text if drawable(text) and text.isprintable() else text.encode("unicode_escape").decode("ascii")
    shown = shown if len(shown) <= longest else f"{shown[: longest - 1]}…"
    return shown.replace("$", r"\$")  # matplotlib reads text between dollar signs as a formula


def text_width(text: str) -> float:
    """Return the width of a label in inches; 0 for a blank label."""
    return float(TextPath((0, 0), text, prop=FONT).get_extents().width) / 72 if text.strip() else 0.0


def draw_heat_map(
    axes: Axes,
    values: Float[np.ndarray, "rows columns"],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    rotated: Sequence[bool],
    largest: float | None = None,
) -> None:
    """Draw values as coloured cells, with labels on the left and on top.

    Args:
        axes: the axes to draw on.
        values: the value of each cell.
        rows, columns: the labels.
        rotated: True for each column with a vertical label.
        largest: the largest absolute value, for values from -largest to largest in two colours. None means values
            from 0 to 1.
    """
    low, high = (0.0, 1.0) if largest is None else (-largest, largest)
    axes.set_facecolor(GRID)  # seen where a value is NaN
    axes.imshow(values, cmap=_colours(largest), vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(columns)), list(columns), fontproperties=FONT, color=INK)
    for label, is_rotated in zip(axes.get_xticklabels(), rotated, strict=True):
        label.set(rotation=90 if is_rotated else 0, va="bottom")
    axes.set_yticks(range(len(rows)), list(rows), fontproperties=FONT, color=INK)
    axes.tick_params(which="both", length=0, pad=4)
    axes.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color=GRID, linewidth=0.5)
    axes.spines[:].set_color(EDGE)


def write_beside(
    axes: Axes,
    text: str,
    anchor: tuple[float, float],
    points: tuple[float, float],
    *,
    size: float = 9.0,
    va: str = "bottom",
    rotation: float = 0.0,
) -> None:
    """Write a small text near `anchor`, a point in fractions of the axes, with an offset of `points` in points."""
    axes.annotate(
        text, anchor, points, xycoords="axes fraction", textcoords="offset points", fontsize=size, color=FAINT,
        va=va, rotation=rotation,
    )  # fmt: skip


def _colours(largest: float | None) -> str:
    return "Blues" if largest is None else "RdBu"


def draw_color_scale(figure: Figure, legend: str, *, largest: float | None = None) -> None:
    """Draw the colour scale of `draw_heat_map` at the bottom left, with a legend next to it."""
    ends = ("0", "0.5", "1") if largest is None else (f"{-largest:.2g}", "0", f"+{largest:.2g}")
    width, height = figure.get_size_inches()
    axes = figure.add_axes((0.25 / width, 0.42 / height, 1.6 / width, 0.12 / height))
    axes.imshow(np.linspace(0, 1, 256)[None], cmap=_colours(largest), aspect="auto", extent=(0, 1, 0, 1))
    axes.set_yticks([])
    axes.set_xticks([0, 0.5, 1], list(ends), fontsize=8, color=FAINT)
    axes.tick_params(length=0)
    axes.spines[:].set_color(EDGE)
    axes.text(1.06, 0.5, legend, fontsize=8, color=FAINT, va="center", transform=axes.transAxes)


def late_limits(curves: Iterable[Sequence[float]]) -> tuple[float, float]:
    """Return limits of a vertical axis that fit the later values of training curves, not the high first values.

    Args:
        curves: the values of each curve, in order; the first fifth of a curve does not count and may lie outside.
    """
    seen = [value for curve in curves for value in curve[len(curve) // 5 :]]
    low, high = min(seen), max(seen)
    margin = 0.06 * ((high - low) or abs(high) or 1.0)
    return low - margin, high + margin


def style_line_axes(axes: Axes, label: str) -> None:
    """Prepare axes for curves: a light grid, no frame at the top and on the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(EDGE)
    axes.grid(visible=True, color=INK, alpha=0.1)
    axes.tick_params(colors=INK, length=0)
    axes.set_xlabel(label, color=INK)


def draw_legend(
    axes: Axes, lines: Sequence[tuple[str, Line2D]], *, corner: Literal["upper right", "lower right"]
) -> None:
    """Add a legend of curves; a long name loses its middle, since runs often differ in their last letters.

    Args:
        axes: the axes of the curves.
        lines: each curve with its name, any text.
        corner: a corner without curves.
    """
    half = LONGEST_NAME // 2
    names = [name if len(name) <= LONGEST_NAME else f"{name[: half - 1]}…{name[-half:]}" for name, _ in lines]
    labels = [label_text(name, longest=2 * LONGEST_NAME) for name in names]
    axes.legend([line for _, line in lines], labels, loc=corner, fontsize=9, labelcolor=INK, edgecolor=EDGE)
