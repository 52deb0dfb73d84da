"""The picture shows the numbers, and no label covers another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from clearhead.apps.compare.report import curve_of, draw_curves, mean_curve
from clearhead.apps.compare.runs import Quality
from clearhead.apps.compare.table import ComparisonRow, read_rows
from clearhead.base.errors import InputError
from tests.apps.compare.run_maker import RunMaker, learning


def make_rows(folder: Path, count: int = 3, seeds: int = 3) -> list[ComparisonRow]:
    paths = []
    for number in range(count):
        for seed in range(1, seeds + 1):
            points = learning(seed, start=4.0, end=2.0 + 0.01 * number, pace=300.0, every=100)
            run_maker = RunMaker(
                overrides=[f"model.dropout=0.{number + 1}"], validations=points, step_seconds=0.02 * (number + 1)
            )
            paths.append(run_maker.write(folder / f"run-{chr(97 + number)}-{seed}", seed=seed))
    return read_rows(paths)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved during a test."""
    saved: list[Figure] = []
    real = Figure.savefig

    def keep(self: Figure, name: Path, *, format: str) -> None:
        saved.append(self)
        real(self, name, format=format)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def test_the_lines_are_the_validations(tmp_path: Path, figures: list[Figure]) -> None:
    rows = make_rows(tmp_path)
    draw_curves(rows, tmp_path / "new" / "c.png", quality="score", name="BLEU")
    left, right = figures[0].axes
    drawn = [line for line in left.get_lines() if len(line.get_xdata()) > 1]
    assert len(drawn) == 3 * (3 + 1)
    seed = rows[0].runs[0]
    assert list(drawn[0].get_xdata()) == [row.tokens for row in seed.metrics]
    assert list(drawn[0].get_ydata()) == [row.valid_score for row in seed.metrics]
    thick = [line for line in drawn if line.get_linewidth() > 2]
    heights = [[row.valid_score or 0.0 for row in run.metrics] for run in rows[0].runs]
    assert list(thick[0].get_ydata()) == pytest.approx([sum(column) / 3 for column in zip(*heights, strict=True)])
    assert len({line.get_color() for line in thick}) == 3
    slow = [line for line in right.get_lines() if line.get_linewidth() > 2 and len(line.get_xdata()) > 1][2]
    assert list(slow.get_xdata())[-1] == pytest.approx(2000 * 0.06), "seconds, for two minutes are few"
    assert left.get_ylabel() == "BLEU" and "tokens" in left.get_xlabel() and "seconds" in right.get_xlabel()
    picture = imread(tmp_path / "new" / "c.png")
    assert picture.shape[1] > 1000 and picture[..., :3].std() > 0.02


def legend(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.parametrize(("count", "quality"), [(1, "loss"), (9, "score")])
def test_every_line_is_named_inside_its_panel(
    tmp_path: Path, figures: list[Figure], count: int, quality: Quality
) -> None:
    rows = make_rows(tmp_path, count, seeds=1)
    draw_curves(rows, tmp_path / "c.png", quality=quality, name=quality)
    for axes in figures[0].axes:
        assert legend(axes) == [row.name for row in rows]
        drawn = [line.get_color() for line in axes.get_lines() if len(line.get_xdata()) > 1]
        assert [line.get_color() for line in axes.get_legend().get_lines()] == drawn
        panel, box = axes.get_window_extent(), axes.get_legend().get_window_extent()
        assert panel.x0 <= box.x0 < box.x1 <= panel.x1 and panel.y0 <= box.y0 < box.y1 <= panel.y1


def test_notes_and_names_are_text_whatever_stands_in_them(tmp_path: Path, figures: list[Figure]) -> None:
    run = RunMaker().write(tmp_path / "_a$x_1$\N{CJK UNIFIED IDEOGRAPH-8BED}")
    draw_curves(read_rows([run]), tmp_path / "c.png", quality="loss", name="loss", notes=["not like $y$: b"])
    assert legend(figures[0].axes[0]) == [r"_a\$x_1\$\u8bed"]
    assert any(text.get_text() == "not like $y$: b" for text in figures[0].texts)


def test_long_names_lose_their_middle(tmp_path: Path, figures: list[Figure]) -> None:
    run = RunMaker().write(tmp_path / ("first-part-" + 40 * "x" + "-last-part"))
    draw_curves(read_rows([run]), tmp_path / "c.png", quality="loss", name="loss")
    (text,) = legend(figures[0].axes[0])
    assert text.startswith("first-part-") and text.endswith("-last-part") and len(text) == 40


def test_rows_without_a_validation_are_left_out(tmp_path: Path) -> None:
    run_path = RunMaker().write(tmp_path / "a")
    none = replace(RunMaker(), overrides=["model.dropout=0.3"], validations=[(40, 2.0, None)]).write(tmp_path / "b")
    assert draw_curves(read_rows([run_path, none]), tmp_path / "c.png", quality="score", name="BLEU") == ["b"]


def test_one_validation_is_a_point(tmp_path: Path) -> None:
    run = RunMaker(validations=[(40, 2.0, None)]).write(tmp_path / "a")
    assert draw_curves(read_rows([run]), tmp_path / "c.png", quality="loss", name="loss") == []


def test_the_start_does_not_flatten_the_rest(tmp_path: Path, figures: list[Figure]) -> None:
    points = [(step, 900.0 if step < 8 else 2.0 + 1 / step, None) for step in range(1, 101)]
    run = RunMaker(validations=points).write(tmp_path / "a")
    draw_curves(read_rows([run]), tmp_path / "c.png", quality="loss", name="loss")
    assert figures[0].axes[0].get_ylim()[1] < 10


def test_a_mean_reaches_as_far_as_every_seed(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, 1, seeds=2)
    curves = [curve_of(run, "loss") for run in rows[0].runs]
    shorter = replace(curves[0], **{name: values[:7] for name, values in vars(curves[0]).items()})
    mean = mean_curve([shorter, curves[1]])
    assert len(mean.values) == len(mean.tokens) == 7
    assert mean.values[3] == pytest.approx((curves[0].values[3] + curves[1].values[3]) / 2)


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        draw_curves(make_rows(tmp_path, 1, 1), tmp_path / "file" / "c.png", quality="loss", name="loss")


def test_drawing_leaves_global_settings_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    draw_curves(make_rows(tmp_path, 1, 1), tmp_path / "c.png", quality="loss", name="loss")
    assert before == dict(matplotlib.rcParams)
