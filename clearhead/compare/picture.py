"""The learning curves of all rows in one picture: against the tokens seen and against time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation, Text
from matplotlib.ticker import EngFormatter, MaxNLocator
from matplotlib.transforms import Bbox

from clearhead.compare.runs import Quality, Run
from clearhead.compare.table import Row
from clearhead.view.figures import INK, drawable, new_figure, save_figure, style_line_axes

COLOURS: Final = ("#2a78b8", "#d95f30", "#1f9e77", "#8e63b5", "#b8860b", "#c8557f", "#4f6272", "#7a9a2e")
DASHES: Final = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
UNITS: Final = ((3 * 3600.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
NEAR: Final = 8
"""Points from the end of a line to its name."""
MARGIN: Final = 30
"""Pixels kept free around a name."""
LONGEST_NAME: Final = 26
THIN: Final = 0.8
THICK: Final = 2.2
LEFT: Final = 0.065


@dataclass(frozen=True)
class Curve:
    """The points of one line: their places on both axes and their heights."""

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    values: tuple[float, ...]


def draw_curves(
    rows: Sequence[Row], path: Path, *, quality: Quality, name: str, notes: Sequence[str] = ()
) -> list[str]:
    """Draw the validations of all rows: a thick line for the mean of a row's seeds, a thin line for each of several.

    Args:
        rows: those without a validation are left out.
        path: the PNG to write.
        quality: which number of a validation to draw.
        name: the label of the vertical axis.
        notes: sentences that must stay with the picture.

    Returns:
        The names of the rows that were left out.

    Raises:
        InputError: the file cannot be written.
    """
    drawn = [row for row in rows if any(run.points(quality) for run in row.runs)]
    lines = ["higher is better" if quality == "score" else "lower is better", *notes]
    if any(len(row.runs) > 1 for row in drawn):
        lines[0] += "; thin: one seed, thick: the mean of the seeds"
    width, height = 11.0, 5.0 + 0.2 * len(notes)
    figure = new_figure(width, height, f"Validation {name}", lines, left=LEFT * width)
    top = 1 - (0.76 + 0.2 * len(lines)) / height
    panels = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=LEFT, right=0.985, wspace=0.12, bottom=0.6 / height, top=top)
    longest = max((run.metrics[-1].seconds for row in drawn for run in row.runs), default=0.0)
    unit, unit_name = next((size, word) for least, size, word in UNITS if longest >= least)
    labels = (("tokens", 1.0, "training tokens"), ("seconds", unit, f"{unit_name}, validations included"))
    for axes, (places, scale, label) in zip(panels, labels, strict=True):
        style_line_axes(axes, label)
        axes.tick_params(labelleft=True)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
        if places == "tokens":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        names = [_draw_row(axes, row, number, places, scale, quality) for number, row in enumerate(drawn)]
        _limit_height(axes, drawn, quality)
        _place_labels(axes, names)
    panels[0].set_ylabel(name, color=INK)
    save_figure(figure, path)
    return [row.name for row in rows if row not in drawn]


def _draw_row(axes: Axes, row: Row, number: int, places: str, scale: float, quality: Quality) -> Annotation:
    """Draw the lines of one row and write its name at their end."""
    color = COLOURS[number % len(COLOURS)]
    style = {"color": color, "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}
    seeds = [curve_of(run, quality) for run in row.runs if run.points(quality)]
    mean = mean_curve(seeds)
    for seed in seeds if len(seeds) > 1 else []:
        _draw_line(axes, seed, places, scale, style | {"linewidth": THIN, "alpha": 0.45})
    x = _draw_line(axes, mean, places, scale, style | {"linewidth": THICK})
    axes.plot(x[-1:], mean.values[-1:], color=color, marker="o", markersize=5, linestyle="none")
    return _label(axes, (x[-1], mean.values[-1]), color, row.name)


def curve_of(run: Run, quality: Quality) -> Curve:
    """Return the validations of one run as a line."""
    points = run.points(quality)
    return Curve(
        tuple(float(row.tokens) for row, _ in points),
        tuple(row.seconds for row, _ in points),
        tuple(value for _, value in points),
    )


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Average lines point by point, up to the end of the shortest."""

    def mean(lines: list[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(fmean(points) for points in zip(*lines, strict=False))

    return Curve(*(mean([getattr(curve, field) for curve in curves]) for field in ("tokens", "seconds", "values")))


def _draw_line(axes: Axes, curve: Curve, places: str, scale: float, style: dict[str, Any]) -> list[float]:
    x = [place / scale for place in getattr(curve, places)]
    axes.plot(x, curve.values, solid_capstyle="round", **style)
    return x


def _label(axes: Axes, end: tuple[float, float], color: str, name: str) -> Annotation:
    """Write a row's name beside the end of its line; `_place_labels` finds room for it."""
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


def _limit_height(axes: Axes, rows: Sequence[Row], quality: Quality) -> None:
    """Give the height to late training: the first fifth of every line may leave the picture."""
    runs = [[value for _, value in run.points(quality)] for row in rows for run in row.runs]
    seen = [value for values in runs for value in values[len(values) // 5 :]]
    low, high = min(seen), max(seen)
    margin = 0.06 * ((high - low) or abs(high) or 1.0)
    axes.set_ylim(low - margin, high + margin)


def _place_labels(axes: Axes, labels: Sequence[Annotation]) -> None:
    """Leave names at the ends of their lines where they cover nothing, else align them in a column at the right."""
    panel = axes.get_window_extent()
    ends, widths = [float(label.xy[0]) for label in labels], [_extent(label).width for label in labels]
    room = [max(1 - (width + MARGIN) / panel.width, 0.3) for width in widths]
    axes.set_xlim(0, max(end / share for end, share in zip(ends, room, strict=True)))
    if not _is_covered(axes, labels):
        return
    axes.set_xlim(0, max(ends) / min(room))
    boxes = [_extent(label) for label in labels]
    height, right = max(box.height for box in boxes), max(box.x0 for box in boxes)
    middles = [(box.y0 + box.y1) / 2 for box in boxes]
    placed = separate(middles, gap=1.05 * height, low=panel.y0 + height / 2, high=panel.y1 - height / 2)
    for label, box, before, after in zip(labels, boxes, middles, placed, strict=True):
        points = 72 / axes.figure.dpi
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
