"""Draw a confusion matrix: the count of each pair of an expected and a predicted label.

Shape suffixes: L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int64
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from clearhead.base.errors import InputError
from clearhead.base.figures import (
    FONT,
    INK,
    draw_color_scale,
    draw_heat_map,
    label_text,
    new_figure,
    save_figure,
    text_width,
    write_beside,
)

LEGEND = "share of the expected class"
_ROOMY, _NARROW, _WIDEST = 0.62, 0.24, 1.2  # width of a cell in inches: with few labels, with many, at most
_FEW, _MANY = 4, 30
_SMALLEST_COUNT = 4.5  # points; smaller numbers are unreadable
_LONGEST_NAME = 28  # letters
_DARK = 0.55


def draw_confusion(
    confusion_LL: Int64[np.ndarray, "labels labels"], labels: Sequence[str], path: Path, *, title: str
) -> None:
    """Draw a confusion matrix; the colour of a cell is its share of the row.

    Args:
        confusion_LL: counts, row = expected, column = predicted, from `evaluate.metrics.confusion_matrix`.
        labels: names of the classes.
        path: PNG file to write.
        title: one line above the picture.

    Raises:
        InputError: the number of names differs from the number of classes, or the file cannot be written.
    """
    if len(labels) != len(confusion_LL) or not len(labels):
        raise InputError(f"a confusion matrix of {len(confusion_LL)} classes needs one name each, got {len(labels)}")
    names = [label_text(name, _LONGEST_NAME) for name in labels]
    size = len(names)
    widths = [text_width(name) for name in names]
    cell = float(np.interp(size, [_FEW, _MANY], [_ROOMY, _NARROW]))
    if size <= _FEW:
        # With few columns there is room for horizontal names.
        cell = float(np.clip(max(widths) + 0.2, _ROOMY, _WIDEST))
    is_vertical = max(widths) > cell - 0.08
    left = max(widths) + 0.55
    labels_top = (max(widths) if is_vertical else 0.16) + 0.1
    top, bottom, right = 0.9 + labels_top + 0.3, 0.85, 0.75
    grid = size * cell
    total, correct = int(confusion_LL.sum()), int(np.trace(confusion_LL))
    subtitle = f"{correct:,} of {total:,} correct: {100 * correct / max(1, total):.1f} %"
    texts = (text_width(title) * 1.4 + 0.5, text_width(subtitle) + 0.5, text_width(LEGEND) + 2.3)
    width, height = max(left + grid + right, *texts), top + grid + bottom
    figure = new_figure(width, height, title, [subtitle])
    axes = figure.add_axes((left / width, bottom / height, grid / width, grid / height))
    draw_heat_map(axes, shares(confusion_LL), names, names, rotated=[is_vertical] * size)
    for index in range(size):
        # A thin frame marks the diagonal, which has the correct predictions.
        axes.add_patch(
            Rectangle((index - 0.5, index - 0.5), 1, 1, fill=False, edgecolor="#8fa3b5", linewidth=0.8, zorder=3)
        )
    _write_counts(axes, confusion_LL, cell)
    _write_recall(axes, confusion_LL, cell)
    write_beside(axes, "predicted", (0.0, 1.0), (0.0, 72 * (labels_top + 0.08)))
    write_beside(axes, "expected", (0.0, 1.0), (-72 * (left - 0.25), 0.0), rotation=90.0, va="top")
    draw_color_scale(figure, LEGEND)
    save_figure(figure, path)


def shares(confusion_LL: Int64[np.ndarray, "labels labels"]) -> Float[np.ndarray, "labels labels"]:
    """Divide each count of a confusion matrix by the sum of its row; a row without counts is zero.

    Args:
        confusion_LL: counts, row = expected, column = predicted.
    """
    share_LL: Float[np.ndarray, "labels labels"] = confusion_LL / np.maximum(confusion_LL.sum(1, keepdims=True), 1)
    return share_LL


def _write_counts(axes: Axes, confusion_LL: Int64[np.ndarray, "labels labels"], cell: float) -> None:
    """Write every nonzero count that is readable at the size of its cell."""
    share_LL = shares(confusion_LL)
    # Measuring a text is slow, and most counts of a large matrix repeat.
    widths = {count: text_width(f"{count:,}") for count in np.unique(confusion_LL).tolist()}
    for row, column in zip(*np.nonzero(confusion_LL), strict=True):
        count = int(confusion_LL[row, column])
        points = min(9.0, FONT.get_size() * 0.82 * cell / widths[count])
        if points >= _SMALLEST_COUNT:
            color = "white" if share_LL[row, column] > _DARK else INK
            axes.text(column, row, f"{count:,}", fontsize=points, color=color, ha="center", va="center_baseline")


def _write_recall(axes: Axes, confusion_LL: Int64[np.ndarray, "labels labels"], cell: float) -> None:
    """Write the recall of each class at the end of its row."""
    for row, counts in enumerate(confusion_LL):
        text = f"{100 * counts[row] / counts.sum():.0f} %" if counts.sum() else "–"
        anchor = (1.0, 1 - (row + 0.5) / len(confusion_LL))
        write_beside(axes, text, anchor, (6.0, 0.0), size=min(9.0, 30 * cell), va="center")
    write_beside(axes, "recall", (1.0, 1.0), (6.0, 4.0))
