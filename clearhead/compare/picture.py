"""The learning curves of all rows in one picture: against the tokens seen and against the time it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation, Text
from matplotlib.ticker import EngFormatter, MaxNLocator
from matplotlib.transforms import Bbox

from clearhead.compare.runs import Quality, Run
from clearhead.compare.table import Row
from clearhead.errors import InputError
from clearhead.view.plots import FAINT, INK, drawable

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


@dataclass(frozen=True)
class Curve:
    """One line: its places on both axes and its heights, point by point."""

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    values: tuple[float, ...]


def draw_curves(
    rows: Sequence[Row], path: Path, *, quality: Quality, name: str, notes: Sequence[str] = ()
) -> list[str]:
    """Draw the validations of all rows: a thin line for each seed where there are several, a thick one for their mean.

    Args:
        rows: those without a validation are left out.
        path: the PNG to write.
        quality: what of a validation to draw.
        name: what it is called on its axis.
        notes: sentences that must not be separated from the picture.

    Returns:
        The names of the rows that were left out.

    Raises:
        InputError: the file cannot be written.
    """
    drawn = [row for row in rows if any(run.points(quality) for run in row.runs)]
    figure = Figure(figsize=(11.0, 5.0 + 0.2 * len(notes)), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    longest = max((run.metrics[-1].seconds for row in drawn for run in row.runs), default=0.0)
    unit, unit_name = next((size, word) for least, size, word in UNITS if longest >= least)
    left, right = figure.subplots(1, 2, sharey=True)
    _prepare(left, "training tokens")
    _prepare(right, f"{unit_name}, validations included")
    left.xaxis.set_major_formatter(EngFormatter(sep=""))
    labels: dict[Axes, list[Annotation]] = {left: [], right: []}
    for number, row in enumerate(drawn):
        style = {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": DASHES[number // len(COLOURS) % len(DASHES)],
        }
        seeds = [curve_of(run, quality) for run in row.runs if run.points(quality)]
        mean = mean_curve(seeds)
        for axes, places in ((left, "tokens"), (right, "seconds")):
            scale = unit if places == "seconds" else 1.0
            for seed in seeds if len(seeds) > 1 else []:
                _line(axes, seed, places, scale, style, thin=True)
            _line(axes, mean, places, scale, style, thin=False)
            labels[axes].append(_label(axes, mean, places, scale, str(style["color"]), row.name))
    _limit(left, drawn, quality)
    _words(figure, left, drawn, quality, name, notes)
    for axes, names in labels.items():
        _place_labels(axes, names)
    _save(figure, path)
    return [row.name for row in rows if row not in drawn]


def curve_of(run: Run, quality: Quality) -> Curve:
    """Return the validations of one run as a line."""
    points = run.points(quality)
    return Curve(
        tuple(float(row.tokens) for row, _ in points),
        tuple(row.seconds for row, _ in points),
        tuple(value for _, value in points),
    )


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Average lines point by point, as far as all of them reach."""
    shortest = min(len(curve.values) for curve in curves)

    def mean(lines: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(sum(line[index] for line in lines) / len(lines) for index in range(shortest))

    return Curve(
        mean([curve.tokens for curve in curves]),
        mean([curve.seconds for curve in curves]),
        mean([curve.values for curve in curves]),
    )


def _prepare(axes: Axes, label: str) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c5ccd3")
    axes.grid(visible=True, color=INK, alpha=0.1)
    axes.tick_params(colors=INK, length=0, labelleft=True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlabel(label, color=INK)


def _line(axes: Axes, curve: Curve, places: str, scale: float, style: dict[str, Any], *, thin: bool) -> None:
    x = [place / scale for place in getattr(curve, places)]
    width, alpha = (THIN, 0.45) if thin else (THICK, 1.0)
    axes.plot(x, curve.values, linewidth=width, alpha=alpha, solid_capstyle="round", **style)
    if not thin:
        axes.plot(x[-1:], curve.values[-1:], color=style["color"], marker="o", markersize=5, linestyle="none")


def _label(axes: Axes, curve: Curve, places: str, scale: float, colour: str, name: str) -> Annotation:
    """Write a row's name beside the end of its line; `_place_labels` finds room for it."""
    label = axes.annotate(
        _shown(name),
        (getattr(curve, places)[-1] / scale, curve.values[-1]),
        (NEAR, 0),
        textcoords="offset points",
        color=colour,
        fontsize=10,
        fontweight="bold",
        va="center",
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
        arrowprops={
            "arrowstyle": "-",
            "color": colour,
            "linewidth": 0.8,
            "alpha": 0.6,
            "shrinkA": 2,
            "shrinkB": 4,
            "relpos": (0, 0.5),
        },
    )
    label.set_parse_math(False)
    return label


def _shown(name: str) -> str:
    """Return a name as the font can write it, without the middle of a long one."""
    letters = [letter if drawable(letter) else "\N{REPLACEMENT CHARACTER}" for letter in name]
    if len(letters) > LONGEST_NAME:
        half = LONGEST_NAME // 2
        letters[half - 1 : 1 - half] = "\N{HORIZONTAL ELLIPSIS}"
    return "".join(letters)


def _limit(axes: Axes, rows: Sequence[Row], quality: Quality) -> None:
    """Give the height to what is learned late: the first fifth of every line may leave the picture."""
    seen = []
    for row in rows:
        for run in row.runs:
            values = [value for _, value in run.points(quality)]
            seen += values[len(values) // 5 :]
    low, high = min(seen), max(seen)
    margin = 0.06 * ((high - low) or abs(high) or 1.0)
    axes.set_ylim(low - margin, high + margin)


def _words(figure: Figure, axes: Axes, rows: Sequence[Row], quality: Quality, name: str, notes: Sequence[str]) -> None:
    height = figure.get_figheight()
    better = "higher is better" if quality == "score" else "lower is better"
    lines = [better]
    if any(len(row.runs) > 1 for row in rows):
        lines[0] += "; thin: one seed, thick: the mean of the seeds"
    lines += notes
    axes.set_ylabel(name, color=INK)
    figure.text(0.065, 1 - 0.34 / height, f"Validation {name}", fontsize=14, fontweight="bold", color=INK, va="center")
    for number, line in enumerate(lines):
        place = 1 - (0.64 + 0.2 * number) / height
        figure.text(0.065, place, line, fontsize=9.5, color=FAINT, va="center", parse_math=False)
    figure.subplots_adjust(
        left=0.065, right=0.985, wspace=0.12, bottom=0.6 / height, top=1 - (0.76 + 0.2 * len(lines)) / height
    )


def _place_labels(axes: Axes, labels: Sequence[Annotation]) -> None:
    """Leave names at the ends of their lines if they cover nothing there, else put them in a column at the right."""
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
    """Return the box of the words alone; the annotation's own would hold the line that leads to them."""
    label.get_window_extent()  # moves the words to where they belong since the limits of the axes changed
    return Text.get_window_extent(label)


def _is_covered(axes: Axes, labels: Sequence[Annotation]) -> bool:
    """Return whether a name lies over another one or over a thick line."""
    boxes = [_extent(label) for label in labels]
    if any(one.overlaps(other) for one, other in combinations(boxes, 2)):
        return True
    for line in axes.get_lines():
        if line.get_linewidth() > THIN:
            x, y = axes.transData.transform(line.get_xydata()).T
            # The corners of a line alone may lie on both sides of a name
            steps = np.linspace(0, len(x) - 1, 20 * len(x))
            x, y = (np.interp(steps, np.arange(len(x)), values) for values in (x, y))
            if any(((x > box.x0) & (x < box.x1) & (y > box.y0) & (y < box.y1)).any() for box in boxes):
                return True
    return False


def separate(heights: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Move heights apart, in their order and by the least sum of squares.

    Args:
        heights: where each wants to be.
        gap: how far apart neighbours have to be; less where there is no room for it.
        low: no height goes below it.
        high: no height goes above it.
    """
    order = sorted(range(len(heights)), key=lambda index: (heights[index], index))
    gap = min(gap, (high - low) / max(1, len(order) - 1))
    # With every gap taken out, heights may touch but not pass: groups that would pass share their mean
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


def _save(figure: Figure, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise InputError(f"the picture {path} cannot be written: {error.strerror}") from None
