"""Pictures of a run: there when there are numbers, never in the way of the training."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from clearhead.base.progress import use_display
from clearhead.checkpoints.runs.metrics import MetricsRow
from clearhead.training.progress import pictures
from clearhead.training.progress.pictures import smooth, write_plots
from clearhead.training.progress.plots import Plotter, training_loss_note
from tests.recording_display import RecordingDisplay


def rows(count: int = 30, *, valid: bool = True, score: bool = True) -> list[MetricsRow]:
    metrics = []
    for index in range(1, count + 1):
        validated = valid and index % 5 == 0
        metrics.append(
            MetricsRow(
                index * 10, index * 400, float(index), 9 / index, 1e-3 * index, 800.0,
                valid_loss=8 / index if validated else None,
                valid_score=float(index) if validated and score else None,
            )
        )  # fmt: skip
    return metrics


@pytest.mark.parametrize("count", [1, 2, 30])
def test_pictures_are_drawn_from_whatever_there_is(tmp_path: Path, count: int) -> None:
    written = write_plots(tmp_path / "plots", rows(count), score_name="BLEU")
    expected = ["loss.png", "learning_rate.png"] + ["score.png"] * (count >= 5)
    assert [path.name for path in written] == expected
    for path in written:
        picture = imread(path)
        assert picture.shape[0] > 300 and picture.shape[1] > 500
        assert picture[..., :3].std() > 0.02, "the picture is not blank"
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(expected)


def draw_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, metrics: list[MetricsRow]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    real = Figure.savefig

    def keep(self: Figure, fname: Path, *, format: str) -> None:
        figures[Path(fname).name.split(".")[1]] = self
        real(self, fname, format=format)

    monkeypatch.setattr(Figure, "savefig", keep)
    write_plots(tmp_path, metrics, score_name="BLEU", note="with dropout")
    return figures


def test_the_pictures_show_the_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    metrics = rows()
    figures = draw_figures(monkeypatch, tmp_path, metrics)
    loss, rate, score = (figures[name].axes[0] for name in ("loss", "learning_rate", "score"))
    single, _, validations, _ = loss.get_lines()
    assert list(single.get_xydata()[:, 1]) == [row.loss for row in metrics]
    assert list(validations.get_xdata()) == [50, 100, 150, 200, 250, 300]
    texts = {name: [text.get_text() for text in figure.texts] for name, figure in figures.items()}
    assert texts["loss"] == [
        "Loss", "star: the best validation, 0.2667 at step 300", "with dropout",
    ]  # fmt: skip
    assert texts["score"] == ["Validation BLEU", "star: the best validation, 30 at step 300"]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["training", "validation"]
    assert list(rate.get_lines()[0].get_ydata()) == [row.learning_rate for row in metrics]
    assert score.get_ylabel() == "BLEU" and loss.get_xlabel() == "training step" and "nats" in loss.get_ylabel()


@pytest.mark.parametrize(("peak", "label"), [(4e-3, "× 0.001"), (2.5e-5, "× 1e-05")])
def test_labels_of_small_learning_rates_have_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, peak: float, label: str
) -> None:
    metrics = [MetricsRow(step, step, 1.0, 1.0, peak * step / 99, 1.0) for step in range(1, 100)]
    figure = draw_figures(monkeypatch, tmp_path, metrics)["learning_rate"]
    (axes,) = figure.axes
    assert axes.get_ylabel() == f"learning rate, {label}"
    assert axes.yaxis.label.get_window_extent().x0 > 0, "nothing is cut off"


LOSSES: dict[str, Callable[[int], float]] = {
    "of a language model": lambda step: 3.8 + 7 * math.exp(-step / 60) + 0.9 * (1 - step / 1237),
    "of a demo that is solved": lambda step: 3.0 * math.exp(-step / 100),
    "huge at the start": lambda step: 1000.0 if step < 4 else 2.0,
    "hardly falling": lambda step: 2.31 - step / 1e5,
    "zero at the end": lambda step: max(0.0, 1.0 - step / 1000),
    "zero": lambda step: 0.0,
    "below zero": lambda step: 1.0 - step / 500,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("last", [2, 1000])
def test_the_whole_run_is_in_the_picture_of_losses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, last: int
) -> None:
    steps = sorted({*range(1, last + 1, max(1, last // 60)), last})
    metrics = [MetricsRow(step, step, 1.0, LOSSES[name](step * 1237 // last), 1e-3, 1.0) for step in steps]
    metrics[-1] = replace(metrics[-1], valid_loss=0.3)
    figure = draw_figures(monkeypatch, tmp_path, metrics)["loss"]
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    drawn_losses = [row.loss for row in metrics if row.loss > 0 or axes.get_yscale() == "linear"]
    assert low <= min([*drawn_losses, 0.3]) and max([*drawn_losses, 0.3]) <= high
    ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
    assert len(ticks) >= 2 or name in ("zero", "hardly falling")
    assert axes.get_yscale() == ("linear" if name == "below zero" else "log")
    figure.canvas.draw()
    shown = [label for label, tick in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True) if tick in ticks]
    assert all(lower.get_window_extent().y1 < two.get_window_extent().y0 for lower, two in pairwise(shown))
    assert axes.yaxis.label.get_window_extent().x0 > 0, "nothing is cut off"


@pytest.mark.parametrize("last", [1, 2, 43, 1000, 1237, 60_000])
def test_the_last_step_has_a_tick_that_touches_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, last: int
) -> None:
    figures = draw_figures(
        monkeypatch, tmp_path, [MetricsRow(step, 1, 1.0, 1.0, 1e-3, 1.0) for step in sorted({1, last})]
    )
    for figure in figures.values():
        (axes,) = figure.axes
        figure.canvas.draw()
        shown = [label for label in axes.get_xticklabels() if label.get_text()]
        assert shown[-1].get_text() == f"{last:,}"
        boxes = [label.get_window_extent() for label in shown]
        assert all(left.x1 < two.x0 for left, two in pairwise(boxes))
        assert boxes[-1].x1 < figure.bbox.x1, "nothing is cut off"


def test_smoothing_keeps_constants_and_does_not_lag() -> None:
    steps = list(range(0, 700, 7))
    assert smooth([3.5] * len(steps), steps, 20.0) == pytest.approx([3.5] * len(steps))
    line = [2.0 * step for step in steps]
    assert smooth(line, steps, 20.0)[40:60] == pytest.approx(line[40:60], rel=1e-3)
    noise = random.Random(1)
    noisy = [noise.gauss(0, 1) for _ in steps]
    smoothed = smooth(noisy, steps, 50.0)
    assert sum(value**2 for value in smoothed) < 0.2 * sum(value**2 for value in noisy)


def test_drawing_leaves_random_states_and_global_settings_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state(), random.getstate(), dict(matplotlib.rcParams)
    write_plots(tmp_path, rows())
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[2] == dict(matplotlib.rcParams)


def test_a_plot_that_fails_is_told_once_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "plots").write_text("a file in the way")
    plotter = Plotter(tmp_path / "plots")
    with use_display(display := RecordingDisplay()):
        for _ in range(3):
            plotter.draw(rows())
    assert len(display.messages) == 1 and "training goes on without them" in display.messages[0]


def test_pictures_are_drawn_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [1000.0], []

    def slow(folder: Path, rows: list[MetricsRow], *, score_name: str, note: str) -> list[Path]:
        calls.append(now[0])
        now[0] += 3.0
        return []

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pictures, "write_plots", slow)
    plotter = Plotter(tmp_path, every_seconds=20.0, share=0.02)
    with use_display(display := RecordingDisplay()):
        for _ in range(400):
            plotter.draw_if_due(rows(3))
            now[0] += 1.0
    assert not display.messages
    assert calls[0] == pytest.approx(1020.0)
    assert calls[1] - calls[0] == pytest.approx(3.0 + 3.0 / 0.02), "three seconds of drawing are two percent of 150"


@pytest.mark.parametrize(
    ("dropout", "smoothing", "expected"),
    [
        (0.0, 0.0, ""),
        (0.1, 0.0, "the training loss includes dropout; the validation loss does not"),
        (0.0, 0.1, "the training loss includes label smoothing 0.1; the validation loss does not"),
        (0.1, 0.1, "the training loss includes dropout and label smoothing 0.1; the validation loss does not"),
    ],
)
def test_the_losses_say_what_is_in_them(dropout: float, smoothing: float, expected: str) -> None:
    assert training_loss_note(torch.nn.Sequential(torch.nn.Dropout(dropout)), smoothing) == expected


def test_no_numbers_no_pictures(tmp_path: Path) -> None:
    with use_display(display := RecordingDisplay()):
        Plotter(tmp_path / "plots").draw([])
    assert not display.messages and not (tmp_path / "plots").exists()
