"""A confusion matrix as a picture: what was expected, what was predicted instead, and how often.

Shape suffixes: L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int64
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from clearhead.errors import InputError
from clearhead.view.plots import FAINT, FONT, INK, draw_scale, drawable, text_width

LEGEND = "share of the expected class"
_ROOMY, _NARROW, _WIDEST = 0.62, 0.24, 1.2  # inches of a cell: with few labels, with many, and at most
_FEW, _MANY = 4, 30
_SMALLEST_COUNT = 4.5  # points; smaller figures cannot be read
_LONGEST_NAME = 28  # letters
_DARK = 0.55


def draw_confusion(
    confusion_LL: Int64[np.ndarray, "labels labels"], labels: Sequence[str], path: Path, *, title: str
) -> None:
    """Draw how often each class was taken for each other one; the colour is the share of its row.

    Args:
        confusion_LL: counts, row = expected, column = predicted; as `predict.metrics.confusion_matrix` returns them.
        labels: the names of the classes.
        path: the PNG to write.
        title: one line above.

    Raises:
        InputError: there are not as many names as classes.
    """
    if len(labels) != len(confusion_LL) or not len(labels):
        raise InputError(f"a confusion matrix of {len(confusion_LL)} classes needs as many names, got {len(labels)}")
    names = [_name(label) for label in labels]
    size = len(names)
    widths = [text_width(name) for name in names]
    cell = float(np.interp(size, [_FEW, _MANY], [_ROOMY, _NARROW]))
    if size <= _FEW:
        # So few columns have room for their names as they are read.
        cell = float(np.clip(max(widths) + 0.2, _ROOMY, _WIDEST))
    is_turned = max(widths) > cell - 0.08
    left = max(widths) + 0.55
    labels_top = (max(widths) if is_turned else 0.16) + 0.1
    top, bottom, right = 0.9 + labels_top + 0.3, 0.85, 0.75
    grid = size * cell
    subtitle = _subtitle(confusion_LL)
    width = max(
        left + grid + right, text_width(title) * 1.4 + 0.5, text_width(subtitle) + 0.5, text_width(LEGEND) + 2.3
    )
    height = top + grid + bottom
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.25 / width, 1 - 0.38 / height, _plain(title), fontsize=13, fontweight="bold", color=INK, va="center")
    figure.text(0.25 / width, 1 - 0.66 / height, subtitle, fontsize=9, color=FAINT, va="center")
    axes = figure.add_axes((left / width, bottom / height, grid / width, grid / height))
    _draw_cells(axes, confusion_LL, names, is_turned=is_turned)
    _write_counts(axes, confusion_LL, cell)
    _write_recall(axes, confusion_LL, cell)
    for text, place, turn in (("predicted", (0.0, 1.0), 0), ("expected", (0.0, 1.0), 90)):
        offset = (0, 72 * (labels_top + 0.08)) if not turn else (-72 * (left - 0.25), 0)
        axes.annotate(
            text, place, offset, xycoords="axes fraction", textcoords="offset points", fontsize=9, color=FAINT,
            rotation=turn, va="bottom" if not turn else "top", ha="left",
        )  # fmt: skip
    draw_scale(figure.add_axes((0.25 / width, 0.42 / height, 1.6 / width, 0.12 / height)), LEGEND)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def shares(confusion_LL: Int64[np.ndarray, "labels labels"]) -> Float[np.ndarray, "labels labels"]:
    """Return each count as a share of its row; a class that was never expected has only zeros.

    Args:
        confusion_LL: counts, row = expected.
    """
    share_LL: Float[np.ndarray, "labels labels"] = confusion_LL / np.maximum(confusion_LL.sum(1, keepdims=True), 1)
    return share_LL


def _name(label: str) -> str:
    """Return a label that the font can draw, and that leaves room for the matrix."""
    text = label if drawable(label) else label.encode("unicode_escape").decode("ascii")
    return _plain(text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…")


def _plain(text: str) -> str:
    """Keep matplotlib from reading formulas between dollar signs."""
    return text.replace("$", r"\$")


def _subtitle(confusion_LL: Int64[np.ndarray, "labels labels"]) -> str:
    total, right = int(confusion_LL.sum()), int(np.trace(confusion_LL))
    return f"{right:,} of {total:,} right: {100 * right / max(1, total):.1f} %"


def _draw_cells(
    axes: Axes, confusion_LL: Int64[np.ndarray, "labels labels"], names: Sequence[str], *, is_turned: bool
) -> None:
    size = len(names)
    axes.imshow(shares(confusion_LL), cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest")
    axes.xaxis.tick_top()
    axes.set_xticks(range(size), list(names), fontproperties=FONT, color=INK)
    for label in axes.get_xticklabels():
        label.set(rotation=90 if is_turned else 0, va="bottom")
    axes.set_yticks(range(size), list(names), fontproperties=FONT, color=INK)
    axes.tick_params(which="both", length=0, pad=4)
    axes.set_xticks(np.arange(size + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(size + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="#e4e8ec", linewidth=0.5)
    for spine in axes.spines.values():
        spine.set_color("#c5ccd3")
    for index in range(size):
        # A thin frame leads the eye along the diagonal, where what is right stands.
        axes.add_patch(
            Rectangle((index - 0.5, index - 0.5), 1, 1, fill=False, edgecolor="#8fa3b5", linewidth=0.8, zorder=3)
        )


def _write_counts(axes: Axes, confusion_LL: Int64[np.ndarray, "labels labels"], cell: float) -> None:
    """Write every count that is not zero and can be read at the size of its cell."""
    share_LL = shares(confusion_LL)
    # Measuring a text is slow, and most counts of a large matrix are alike.
    widths = {count: text_width(f"{count:,}") for count in np.unique(confusion_LL).tolist()}
    for row, column in zip(*np.nonzero(confusion_LL), strict=True):
        count = int(confusion_LL[row, column])
        points = min(9.0, FONT.get_size() * 0.82 * cell / widths[count])
        if points >= _SMALLEST_COUNT:
            color = "white" if share_LL[row, column] > _DARK else INK
            axes.text(column, row, f"{count:,}", fontsize=points, color=color, ha="center", va="center_baseline")


def _write_recall(axes: Axes, confusion_LL: Int64[np.ndarray, "labels labels"], cell: float) -> None:
    """Write behind each row how much of it is right."""
    points = min(9.0, 30 * cell)
    for row, counts in enumerate(confusion_LL):
        text = f"{100 * counts[row] / counts.sum():.0f} %" if counts.sum() else "–"
        axes.annotate(
            text, (1, row), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=points,
            color=FAINT, va="center",
        )  # fmt: skip
    axes.annotate(
        "found",
        (1, 1),
        (6, 4),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=9,
        color=FAINT,
        va="bottom",
    )
