"""Draw the plots of a run: loss, learning rate and validation score."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from clearhead.base.figures import COLOURS, INK, THICK, THIN, draw_legend, new_figure, save_figure, style_line_axes
from clearhead.checkpoints.runs.metrics import MetricsRow

_TRAIN, _VALID, _BEST = COLOURS[:3]
_MULTIPLES = ((0.4, ()), (0.7, tuple(range(1, 10))), (3.0, (1, 2, 5)))
"""Labelled multiples of powers of ten, for losses that span less than a number of powers; () means linear steps."""


def write_plots(folder: Path, rows: Sequence[MetricsRow], *, score_name: str = "score", note: str = "") -> list[Path]:
    """Draw every plot that has data.

    Args:
        folder: the folder of the plots; created if missing.
        rows: the lines of `metrics.jsonl`, in the order of steps.
        score_name: the name of the validation score.
        note: a sentence below the title of the loss plot.

    Returns:
        The files written: loss.png, learning_rate.png, and score.png if there is a score.
    """
    folder.mkdir(parents=True, exist_ok=True)
    losses = _Losses.of(rows)
    best_loss = _describe_best(losses.valid, min)
    best_score = _describe_best([(row.step, row.valid_score) for row in rows if row.valid_score is not None], max)
    peak = max(rows, key=lambda row: row.learning_rate)
    highest = [f"at most {peak.learning_rate:.4g}, at step {peak.step:,}"]
    pictures = {
        "loss.png": _Plot("Loss", [*best_loss, note], "mean loss of a label, in nats", losses.draw),
        "learning_rate.png": _Plot("Learning rate", highest, "learning rate", partial(_draw_learning_rate, rows)),
    }
    if best_score:
        pictures["score.png"] = _Plot(f"Validation {score_name}", best_score, score_name, partial(_draw_score, rows))
    return [_write(folder / name, plot, rows[-1].step) for name, plot in pictures.items()]


def smooth(values: Sequence[float], steps: Sequence[int], reach: float) -> list[float]:
    """Return running means; weights halve every `reach` steps in both directions, so the curve does not lag."""
    forward = _running_sums(values, steps, reach)
    backward = _running_sums(values[::-1], steps[::-1], reach)[::-1]
    return [
        (before + after - value) / (weight_before + weight_after - 1.0)
        for value, (before, weight_before), (after, weight_after) in zip(values, forward, backward, strict=True)
    ]


def _running_sums(values: Sequence[float], steps: Sequence[int], reach: float) -> list[tuple[float, float]]:
    sums, total, weight, last = [], 0.0, 0.0, steps[0] if steps else 0
    for value, step in zip(values, steps, strict=True):
        keep = 0.5 ** (abs(step - last) / reach)
        total, weight, last = keep * total + value, keep * weight + 1.0, step
        sums.append((total, weight))
    return sums


@dataclass(frozen=True)
class _Losses:
    """The losses of a run: training, smoothed training and validation."""

    steps: Sequence[int]
    losses: Sequence[float]
    smoothed: Sequence[float]
    valid: Sequence[tuple[int, float]]

    @classmethod
    def of(cls, rows: Sequence[MetricsRow]) -> _Losses:
        """Read the losses from lines of metrics."""
        steps, losses = [row.step for row in rows], [row.loss for row in rows]
        smoothed = smooth(losses, steps, max(1.0, steps[-1] / 150))
        valid = [(row.step, row.valid_loss) for row in rows if row.valid_loss is not None]
        return cls(steps, losses, smoothed, valid)

    def draw(self, axes: Axes) -> None:
        """Draw the curves and their legend."""
        axes.plot(self.steps, self.losses, color=_TRAIN, alpha=0.25, linewidth=THIN)
        lines = [("training", axes.plot(self.steps, self.smoothed, color=_TRAIN, linewidth=THICK)[0])]
        if self.valid:
            best = min(self.valid, key=lambda point: point[1])
            lines.append(("validation", _draw_validations(axes, self.valid, best)))
        _set_loss_scale([*self.losses, *(loss for _, loss in self.valid)], axes)
        draw_legend(axes, lines, corner="upper right")


def _set_loss_scale(losses: Sequence[float], axes: Axes) -> None:
    """Set a logarithmic scale for the losses, unless one of them is negative."""
    positive = [loss for loss in losses if loss > 0]
    if not positive or min(losses) < 0:
        return
    low, high = min(positive), max(positive)
    decades, margin = math.log10(high / low), max((high / low) ** 0.05, 1.02)
    # The most labels that have room.
    multiples = next((multiples for most, multiples in _MULTIPLES if decades < most), (1,))
    locator = LogLocator(subs=multiples, numticks=12) if multiples else MaxNLocator(nbins=7)
    axes.set_yscale("log")
    axes.set_ylim(low / margin, high * margin)
    axes.yaxis.set_major_locator(locator)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(_format_loss))


def _format_loss(loss: float, _: int | None) -> str:
    """Return a loss as a short text, such as 0.05 or 2e-3."""
    return f"{loss:.4g}" if loss >= 0.01 else f"{loss:.0e}".replace("e-0", "e-")


def _draw_learning_rate(rows: Sequence[MetricsRow], axes: Axes) -> None:
    axes.plot([row.step for row in rows], [row.learning_rate for row in rows], color=_TRAIN, linewidth=THICK)
    axes.set_ylim(bottom=0)
    # The axis label has the power of ten, so that the tick labels are short.
    exponent = math.floor(math.log10(max((row.learning_rate for row in rows), default=0.0) or 1.0))
    axes.set_ylabel(f"learning rate, × {10.0**exponent:g}", color=INK)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate / 10**exponent:g}"))


def _draw_score(rows: Sequence[MetricsRow], axes: Axes) -> None:
    points = [(row.step, row.valid_score) for row in rows if row.valid_score is not None]
    _draw_validations(axes, points, max(points, key=lambda point: point[1]))


def _draw_validations(axes: Axes, points: Sequence[tuple[int, float]], best: tuple[int, float]) -> Line2D:
    x, y = zip(*points, strict=True)
    marker_size = 5 if len(points) <= 40 else 0
    (line,) = axes.plot(x, y, color=_VALID, linewidth=THICK, marker="o", markersize=marker_size)
    axes.plot(*best, color=_BEST, marker="*", markersize=14, markeredgecolor="white", linestyle="none")
    return line


def _describe_best(points: Sequence[tuple[int, float]], choose: Callable[..., tuple[int, float]]) -> list[str]:
    if not points:
        return []
    step, value = choose(points, key=lambda point: point[1])
    return [f"star: the best validation, {value:.4g} at step {step:,}"]


@dataclass(frozen=True)
class _Plot:
    """A plot of a run: title, lines below the title, label of the vertical axis, and the function that draws it."""

    title: str
    lines: Sequence[str]
    label: str
    draw: Callable[[Axes], None]


def _write(path: Path, plot: _Plot, last: int) -> Path:
    width, height, left = 7.6, 4.6, 0.095
    lines = [line for line in plot.lines if line]
    figure = new_figure(width, height, plot.title, lines, left=left * width)
    axes = figure.add_subplot()
    figure.subplots_adjust(left=left, right=0.985, bottom=0.55 / height, top=1 - (0.72 + 0.2 * len(lines)) / height)
    style_line_axes(axes, "training step")
    ticks = list(MaxNLocator(nbins=7, integer=True).tick_values(0, last))
    axes.set_xticks([*(tick for tick in ticks if tick <= last - 0.6 * (ticks[1] - ticks[0])), last])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.set_ylabel(plot.label, color=INK)
    plot.draw(axes)
    axes.set_xlim(left=0)
    save_figure(figure, path)
    return path
