"""Pictures of attention for a file, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.textpath import TextPath

CELL = 0.25  # inches
FONT = FontProperties(family="DejaVu Sans", size=10)
LEGEND = "attention weight: row = token being written, column = token looked at"
INK, FAINT = "#1f2933", "#8a94a0"


@dataclass(frozen=True)
class AlignmentHeatMap:
    """What one sentence pair looks at.

    Args:
        weights: attention of each target token (row) over the source tokens (column); a row sums to one.
        source_tokens: column labels.
        target_tokens: row labels.
        title: what stands above.
    """

    weights: Float[np.ndarray, "target source"]
    source_tokens: Sequence[str]
    target_tokens: Sequence[str]
    title: str


def drawable(text: str) -> bool:
    """Return whether the font that comes with matplotlib has every letter of a text."""
    return set(map(ord, text)) <= set(get_font(findfont(FONT)).get_charmap())


def draw_alignments(alignments: Sequence[AlignmentHeatMap], path: Path, *, title: str) -> None:
    """Draw attention weights as heat maps in one picture, the tokens on both axes.

    Args:
        alignments: one heat map each, at least one; drawn two in a row.
        path: the PNG to write.
        title: one line above them all.
    """
    boxes = [_Box.around(alignment) for alignment in alignments]
    rows = [list(range(first, min(first + 2, len(boxes)))) for first in range(0, len(boxes), 2)]
    columns = [max(boxes[n].width for n in range(start, len(boxes), 2)) for start in range(min(2, len(boxes)))]
    heights = [max(boxes[n].height for n in row) for row in rows]
    head, bar = 0.62, 0.75
    width = max(sum(columns) + 0.3, text_width(title) * 1.5 + 0.5, text_width(LEGEND) + 2.2)
    height = head + sum(heights) + bar
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.25 / width, 1 - 0.4 / height, title, fontsize=13, fontweight="bold", color=INK, va="center")
    top = height - head
    for row, row_height in zip(rows, heights, strict=True):
        for place, n in enumerate(row):
            box, left = boxes[n], 0.15 + sum(columns[:place])
            low = top - box.top - box.grid_height
            area = (left + box.left) / width, low / height, box.grid_width / width, box.grid_height / height
            _draw_one(figure.add_axes(area), alignments[n])
        top -= row_height
    draw_scale(figure.add_axes((0.25 / width, 0.42 / height, 1.6 / width, 0.12 / height)), LEGEND)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


@dataclass(frozen=True)
class _Box:
    """The room one heat map takes, in inches: the grid, the labels left of it and above it, and its title."""

    left: float
    top: float
    grid_width: float
    grid_height: float
    title_width: float

    @classmethod
    def around(cls, alignment: AlignmentHeatMap) -> _Box:
        target_size, source_size = alignment.weights.shape
        left = max(text_width(token) for token in alignment.target_tokens) + 0.25
        top = _labels_height(alignment) + 0.45
        return cls(left, top, source_size * CELL, target_size * CELL, text_width(alignment.title) * 1.1)

    @property
    def width(self) -> float:
        return max(self.left + self.grid_width, self.left + self.title_width) + 0.2

    @property
    def height(self) -> float:
        return self.top + self.grid_height + 0.2


def text_width(text: str) -> float:
    """Return how many inches a label takes; a label that is all blank takes none."""
    return float(TextPath((0, 0), text, prop=FONT).get_extents().width) / 72 if text.strip() else 0.0


def _labels_height(alignment: AlignmentHeatMap) -> float:
    """Return the room above the grid: a label wider than its column stands on end."""
    return max(0.16, *(text_width(token) for token in alignment.source_tokens if _is_turned(token)), 0.0) + 0.08


def _is_turned(token: str) -> bool:
    return text_width(token) > CELL


def _draw_one(axes: Axes, alignment: AlignmentHeatMap) -> None:
    target_size, source_size = alignment.weights.shape
    axes.imshow(alignment.weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest")
    axes.xaxis.tick_top()
    axes.set_xticks(range(source_size), alignment.source_tokens, fontproperties=FONT, color=INK)
    for label, token in zip(axes.get_xticklabels(), alignment.source_tokens, strict=True):
        label.set(rotation=90 if _is_turned(token) else 0, va="bottom")
    axes.set_yticks(range(target_size), alignment.target_tokens, fontproperties=FONT, color=INK)
    axes.tick_params(which="both", length=0, pad=3)
    axes.set_xticks(np.arange(source_size + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(target_size + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="#e4e8ec", linewidth=0.5)
    for spine in axes.spines.values():
        spine.set_color("#c5ccd3")
    points = 72 * (_labels_height(alignment) + 0.08)
    axes.annotate(
        alignment.title,
        (0, 1),
        (0, points),
        xycoords="axes fraction",
        textcoords="offset points",
        fontproperties=FONT,
        color=FAINT,
        va="bottom",
    )


def draw_scale(axes: Axes, legend: str) -> None:
    """Draw the colours from 0 to 1 as a bar, with what they mean beside it."""
    axes.imshow(np.linspace(0, 1, 256)[None], cmap="Blues", aspect="auto", extent=(0, 1, 0, 1))
    axes.set_yticks([])
    axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"], fontsize=8, color=FAINT)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_color("#c5ccd3")
    axes.text(
        1.06,
        0.5,
        legend,
        fontsize=8,
        color=FAINT,
        va="center",
        transform=axes.transAxes,
    )
