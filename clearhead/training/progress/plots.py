"""Plots of a run's metrics: loss, learning rate and validation score."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from clearhead.files import replacing
from clearhead.runs.metrics import Metrics

_TRAIN: Final = "#2a78b8"
_VALID: Final = "#d95f30"
_BEST: Final = "#1f9e77"


class Plotter:
    """Plots the metrics of a run from time to time, within a small share of its time.

    A failure does not stop training: it is reported once, and plotting ends.

    Args:
        folder: of the plots, usually RUN/plots.
        tell: called with a message if plotting fails.
        every_seconds: minimum time between two updates.
        share: largest share of the time to spend on plotting.
    """

    def __init__(
        self, folder: Path, tell: Callable[[str], None], *, every_seconds: float = 20.0, share: float = 0.02
    ) -> None:
        self.folder = folder
        self._tell = tell
        self._every_seconds = every_seconds
        self._share = share
        self._not_before = time.monotonic() + every_seconds
        self._works = True

    def draw_if_due(self, rows: Sequence[Metrics], *, score_name: str = "score") -> None:
        """Draw all plots if enough time has passed since the last update."""
        if time.monotonic() >= self._not_before:
            self.draw(rows, score_name=score_name)

    def draw(self, rows: Sequence[Metrics], *, score_name: str = "score") -> None:
        """Draw all plots now."""
        if not self._works or not rows:
            return
        began = time.monotonic()
        try:
            write_plots(self.folder, rows, score_name=score_name)
        except Exception as error:  # noqa: BLE001
            self._works = False
            self._tell(f"The plots cannot be drawn ({type(error).__name__}: {error}); training goes on without them.")
        spent = time.monotonic() - began
        self._not_before = time.monotonic() + max(self._every_seconds, spent / self._share)


def write_plots(folder: Path, rows: Sequence[Metrics], *, score_name: str = "score") -> list[Path]:
    """Draw every plot that has data.

    Args:
        folder: of the plots; created if missing.
        rows: lines of `metrics.jsonl` in the order of their steps.
        score_name: name of the validation score.

    Returns:
        The files written: loss.png, learning_rate.png, and score.png where there is a score.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Any], None]] = {
        "loss.png": lambda axes: _draw_loss(axes, rows),
        "learning_rate.png": lambda axes: _draw_learning_rate(axes, rows),
    }
    if any(row.valid_score is not None for row in rows):
        pictures["score.png"] = lambda axes: _draw_score(axes, rows, score_name)
    return [_write(folder / name, draw) for name, draw in pictures.items()]


def smooth(values: Sequence[float], steps: Sequence[int], reach: float) -> list[float]:
    """Return running means whose weights halve every `reach` steps to both sides, so that the curve does not lag."""
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


def _draw_loss(axes: Any, rows: Sequence[Metrics]) -> None:
    steps, losses = [row.step for row in rows], [row.loss for row in rows]
    smoothed = smooth(losses, steps, max(1.0, steps[-1] / 150))
    axes.plot(steps, losses, color=_TRAIN, alpha=0.25, linewidth=1)
    axes.plot(steps, smoothed, color=_TRAIN, linewidth=2, label="training (dropout and smoothing included)")
    valid = [(row.step, row.valid_loss) for row in rows if row.valid_loss is not None]
    if valid:
        _draw_validations(axes, valid, min(valid, key=lambda point: point[1]), "validation")
    axes.set_ylabel("loss per label (nats)")
    axes.set_title("Loss", loc="left")
    # The high losses of the first steps are cut off.
    seen = [loss for loss, step in zip(losses, steps, strict=True) if step >= steps[-1] * 0.02] + [y for _, y in valid]
    low, high = min(seen), max(seen)
    margin = 0.06 * ((high - low) or 1.0)
    axes.set_ylim(low - margin, high + margin)
    axes.legend(frameon=False)


def _draw_learning_rate(axes: Any, rows: Sequence[Metrics]) -> None:
    axes.plot([row.step for row in rows], [row.learning_rate for row in rows], color=_TRAIN, linewidth=2)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)
    axes.set_ylabel("learning rate")
    axes.set_title("Learning rate", loc="left")


def _draw_score(axes: Any, rows: Sequence[Metrics], name: str) -> None:
    points = [(row.step, row.valid_score) for row in rows if row.valid_score is not None]
    _draw_validations(axes, points, max(points, key=lambda point: point[1]), "validation")
    axes.set_ylabel(name)
    axes.set_title(f"Validation {name}", loc="left")
    axes.legend(frameon=False, loc="lower right")


def _draw_validations(axes: Any, points: Sequence[tuple[int, float]], best: tuple[int, float], label: str) -> None:
    x, y = zip(*points, strict=True)
    marker_size = 5 if len(points) <= 40 else 0
    axes.plot(x, y, color=_VALID, linewidth=2, marker="o", markersize=marker_size, label=label)
    axes.plot(
        *best,
        color=_BEST,
        marker="*",
        markersize=13,
        linestyle="none",
        label=f"best: {best[1]:.4g} at step {best[0]:,}",
    )


def _write(path: Path, draw: Callable[[Any], None]) -> Path:
    # Imported here because it takes a second. Without pyplot, which keeps global state.
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    from clearhead.view.figures import style_line_axes

    figure = Figure(figsize=(7.2, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    style_line_axes(axes, "step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    draw(axes)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")
    return path
