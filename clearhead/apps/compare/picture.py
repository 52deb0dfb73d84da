"""The learning curves of all rows in one picture: against the tokens seen and against time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from clearhead.apps.compare.runs import Quality, Run
from clearhead.apps.compare.table import Row
from clearhead.base.figures import (
    COLOURS,
    INK,
    THICK,
    THIN,
    draw_legend,
    late_limits,
    new_figure,
    save_figure,
    style_line_axes,
)

DASHES: Final = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
UNITS: Final = ((3 * 3600.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
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
    unit, unit_name = _time_unit(drawn)
    labels = (("tokens", 1.0, "training tokens"), ("seconds", unit, f"{unit_name}, validations included"))
    for axes, (places, scale, label) in zip(panels, labels, strict=True):
        style_line_axes(axes, label)
        _draw_panel(axes, drawn, places, scale, quality)
    panels[0].set_ylabel(name, color=INK)
    save_figure(figure, path)
    return [row.name for row in rows if row not in drawn]


def _time_unit(rows: Sequence[Row]) -> tuple[float, str]:
    """Return the seconds and the name of the unit for the time of the longest run."""
    longest = max((run.metrics[-1].seconds for row in rows for run in row.runs), default=0.0)
    return next((seconds, name) for least, seconds, name in UNITS if longest >= least)


def _draw_panel(axes: Axes, rows: Sequence[Row], places: str, scale: float, quality: Quality) -> None:
    axes.tick_params(labelleft=True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    if places == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    lines = [(row.name, _draw_row(axes, row, number, places, scale, quality)) for number, row in enumerate(rows)]
    axes.set_xlim(left=0)
    axes.set_ylim(late_limits([value for _, value in run.points(quality)] for row in rows for run in row.runs))
    draw_legend(axes, lines, corner="upper right" if quality == "loss" else "lower right")


def _draw_row(axes: Axes, row: Row, number: int, places: str, scale: float, quality: Quality) -> Line2D:
    """Draw the lines of one row; return that of its mean."""
    color = COLOURS[number % len(COLOURS)]
    style = {"color": color, "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}
    seeds = [curve_of(run, quality) for run in row.runs if run.points(quality)]
    mean = mean_curve(seeds)
    for seed in seeds if len(seeds) > 1 else []:
        _draw_line(axes, seed, places, scale, style | {"linewidth": THIN, "alpha": 0.45})
    ending = {"marker": "o", "markersize": 5, "markevery": [-1]}
    return _draw_line(axes, mean, places, scale, style | {"linewidth": THICK, **ending})


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


def _draw_line(axes: Axes, curve: Curve, places: str, scale: float, style: dict[str, Any]) -> Line2D:
    x = [place / scale for place in getattr(curve, places)]
    (line,) = axes.plot(x, curve.values, solid_capstyle="round", **style)
    return line
