"""Names of curves beside the ends of their lines, in place of a legend."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox, BboxBase

from clearhead.view.figures import drawable

NEAR: Final = 8
"""Points from the end of a line to its name."""
MARGIN: Final = 30
"""Pixels kept free around a name."""
LONGEST_NAME: Final = 26
THIN: Final = 0.8
"""Lines up to this width may be covered by a name."""
THICK: Final = 2.2


def label_line(axes: Axes, end: tuple[float | int, float], color: str, name: str) -> Annotation:
    """Write a name beside the end of its line; `place_labels` finds room for it."""
    pointer = {"arrowstyle": "-", "color": color, "linewidth": 0.8, "alpha": 0.6, "shrinkA": 2, "shrinkB": 4}
    label = axes.annotate(
        _shown(name),
        end,
        (NEAR, 0),
        textcoords="offset points",
        color=color,
        fontsize=10,
        fontweight="bold",
        va="center",
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
        arrowprops=pointer | {"relpos": (0, 0.5)},
    )
    label.set_parse_math(False)
    return label


def _shown(name: str) -> str:
    """Return a name in characters that the font has, without the middle of a long name."""
    letters = [letter if drawable(letter) else "\N{REPLACEMENT CHARACTER}" for letter in name]
    if len(letters) > LONGEST_NAME:
        half = LONGEST_NAME // 2
        letters[half - 1 : 1 - half] = "\N{HORIZONTAL ELLIPSIS}"
    return "".join(letters)


def place_labels(axes: Axes, labels: Sequence[Annotation]) -> None:
    """Leave names at the ends of their lines where they cover nothing, else align them in a column at the right."""
    panel = axes.get_window_extent()
    ends = [float(label.xy[0]) for label in labels]
    room = [max(1 - (_extent(label).width + MARGIN) / panel.width, 0.3) for label in labels]
    axes.set_xlim(0, max(end / share for end, share in zip(ends, room, strict=True)))
    if _is_covered(axes, labels):
        axes.set_xlim(0, max(ends) / min(room))
        _align(labels, panel, 72 / axes.figure.dpi)


def _align(labels: Sequence[Annotation], panel: BboxBase, points: float) -> None:
    """Move names into a column; a pixel has so many points."""
    boxes = [_extent(label) for label in labels]
    height, right = max(box.height for box in boxes), max(box.x0 for box in boxes)
    middles = [(box.y0 + box.y1) / 2 for box in boxes]
    placed = separate(middles, gap=1.05 * height, low=panel.y0 + height / 2, high=panel.y1 - height / 2)
    for label, box, before, after in zip(labels, boxes, middles, placed, strict=True):
        label.set_position((NEAR + (right - box.x0) * points, (after - before) * points))


def _extent(label: Annotation) -> Bbox:
    """Return the box of the text alone; that of the annotation includes the line that leads to it."""
    label.get_window_extent()  # updates the position of the text after the limits of the axes changed
    return Text.get_window_extent(label)


def _is_covered(axes: Axes, labels: Sequence[Annotation]) -> bool:
    """Return whether a name overlaps another name or a thick line."""
    boxes = [_extent(label) for label in labels]
    if any(first.overlaps(second) for first, second in combinations(boxes, 2)):
        return True
    for line in axes.get_lines():
        if line.get_linewidth() > THIN:
            x, y = axes.transData.transform(line.get_xydata()).T
            # A name may lie between two corners of a line, so points between them are checked too.
            steps = np.linspace(0, len(x) - 1, 20 * len(x))
            x, y = (np.interp(steps, np.arange(len(x)), values) for values in (x, y))
            if any(((x > box.x0) & (x < box.x1) & (y > box.y0) & (y < box.y1)).any() for box in boxes):
                return True
    return False


def separate(heights: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Move heights apart in their order, by the least sum of squares (isotonic regression).

    Args:
        heights: the preferred heights.
        gap: the least distance of neighbours; less where there is no room for it.
        low, high: the limits.
    """
    order = sorted(range(len(heights)), key=lambda index: (heights[index], index))
    gap = min(gap, (high - low) / max(1, len(order) - 1))
    # With the gaps subtracted, heights may touch but not pass: groups that would pass share their mean.
    groups: list[tuple[float, int]] = []
    for rank, index in enumerate(order):
        mean, size = heights[index] - rank * gap, 1
        while groups and groups[-1][0] > mean:
            before, count = groups.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        groups.append((mean, size))
    means = [mean for mean, size in groups for _ in range(size)]
    top = high - (len(order) - 1) * gap
    placed = [0.0] * len(order)
    for rank, (index, mean) in enumerate(zip(order, means, strict=True)):
        placed[index] = min(max(mean, low), max(top, low)) + rank * gap
    return placed
