"""Pictures of a run: there when there are numbers, never in the way of the training."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from clearhead.kernels.dropout import Dropout
from clearhead.progress import shown_by
from clearhead.runs.metrics import Metrics
from clearhead.training.progress import pictures
from clearhead.training.progress.pictures import smooth, write_plots
from clearhead.training.progress.plots import Plotter, training_loss_note
from tests.told import Told


def rows(count: int = 30, *, valid: bool = True, score: bool = True) -> list[Metrics]:
    made = []
    for index in range(1, count + 1):
        validated = valid and index % 5 == 0
        made.append(
            Metrics(
                index * 10, index * 400, float(index), 9 / index, 1e-3 * index, 800.0,
                valid_loss=8 / index if validated else None,
                valid_score=float(index) if validated and score else None,
            )
        )  # fmt: skip
    return made


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


def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: list[Metrics]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    real = Figure.savefig

    def keep(self: Figure, fname: Path, *, format: str) -> None:
        figures[Path(fname).name.split(".")[1]] = self
        real(self, fname, format=format)

    monkeypatch.setattr(Figure, "savefig", keep)
    write_plots(tmp_path, made, score_name="BLEU", note="with dropout")
    return figures


def test_the_pictures_show_the_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = rows()
    figures = drawn(monkeypatch, tmp_path, made)
    loss, rate, score = (figures[name].axes[0] for name in ("loss", "learning_rate", "score"))
    single, _, validations, _ = loss.get_lines()
    assert list(single.get_xydata()[:, 1]) == [row.loss for row in made]
    assert list(validations.get_xdata()) == [50, 100, 150, 200, 250, 300]
    texts = {name: [text.get_text() for text in figure.texts] for name, figure in figures.items()}
    assert texts["loss"] == [
        "Loss", "star: the best validation, 0.2667 at step 300", "with dropout",
        "above the picture: the losses before step 70, from 9 on",
    ]  # fmt: skip
    assert texts["score"] == ["Validation BLEU", "star: the best validation, 30 at step 300"]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["training", "validation"]
    assert list(rate.get_lines()[0].get_ydata()) == [row.learning_rate for row in made]
    assert score.get_ylabel() == "BLEU" and loss.get_xlabel() == "training step" and "nats" in loss.get_ylabel()


@pytest.mark.parametrize(("peak", "label"), [(4e-3, "× 0.001"), (2.5e-5, "× 1e-05")])
def test_labels_of_small_learning_rates_have_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, peak: float, label: str
) -> None:
    made = [Metrics(step, step, 1.0, 1.0, peak * step / 99, 1.0) for step in range(1, 100)]
    figure = drawn(monkeypatch, tmp_path, made)["learning_rate"]
    (axes,) = figure.axes
    assert axes.get_ylabel() == f"learning rate, {label}"
    assert axes.yaxis.label.get_window_extent().x0 > 0, "nothing is cut off"


def test_the_start_does_not_flatten_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = [Metrics(step, step, 1.0, 1000.0 if step < 4 else 2.0, 1e-3, 1.0) for step in range(1, 500)]
    _, high = drawn(monkeypatch, tmp_path, made)["loss"].axes[0].get_ylim()
    assert high < 10


def test_late_training_has_the_height(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A loss that falls fast and then slowly, as of a language model."""
    made = [
        Metrics(step, step, 1.0, 3.8 + 4 * math.exp(-step / 60) + 0.9 * (1 - step / 1200), 1e-3, 1.0)
        for step in range(10, 1210, 10)
    ]
    figure = drawn(monkeypatch, tmp_path, made)["loss"]
    low, high = figure.axes[0].get_ylim()
    late = [row.loss for row in made if row.step >= 300]
    assert (max(late) - min(late)) / (high - low) > 0.8 and high > max(late) and low < min(late)
    said = next(text.get_text() for text in figure.texts if "above" in text.get_text())
    first = int(said.split("step ")[1].split(",")[0])
    assert 200 < first < 300 and said.endswith("from 8.08 on")


def test_the_best_validation_is_never_cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = [
        Metrics(step, step, 1.0, 1.0, 1e-3, 1.0, valid_loss=0.3 if step == 20 else 1.0 + step / 1000)
        for step in range(10, 1010, 10)
    ]
    figure = drawn(monkeypatch, tmp_path, made)["loss"]
    assert figure.axes[0].get_ylim()[0] < 0.3
    assert not any("above" in text.get_text() for text in figure.texts), "nothing is above the picture"


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
    with shown_by(told := Told()):
        for _ in range(3):
            plotter.draw(rows())
    assert len(told.messages) == 1 and "training goes on without them" in told.messages[0]


def test_pictures_are_drawn_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [1000.0], []

    def slow(folder: Path, rows: list[Metrics], *, score_name: str, note: str) -> list[Path]:
        calls.append(now[0])
        now[0] += 3.0
        return []

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pictures, "write_plots", slow)
    plotter = Plotter(tmp_path, every_seconds=20.0, share=0.02)
    with shown_by(told := Told()):
        for _ in range(400):
            plotter.draw_if_due(rows(3))
            now[0] += 1.0
    assert not told.messages
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
    assert training_loss_note(torch.nn.Sequential(Dropout(dropout)), smoothing) == expected


def test_no_numbers_no_pictures(tmp_path: Path) -> None:
    with shown_by(told := Told()):
        Plotter(tmp_path / "plots").draw([])
    assert not told.messages and not (tmp_path / "plots").exists()
