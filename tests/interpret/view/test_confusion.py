"""The picture of a confusion matrix: colours are shares of rows, counts stand where they can be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from clearhead.base.errors import InputError
from clearhead.interpret.view.confusion import draw_confusion, shares
from tests.interpret.view.test_alignment import png_size


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, path: Path, *, format: str) -> None:
        figures.append(self)
        save(self, path, format=format)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def texts(figure: Figure) -> list[str]:
    figure_texts = [text.get_text() for text in figure.texts]
    return figure_texts + [text.get_text() for axes in figure.axes for text in axes.texts]


def test_colours_are_shares_of_rows() -> None:
    confusion = np.array([[3, 1, 0], [0, 0, 0], [2, 2, 4]])
    assert shares(confusion).tolist() == [[0.75, 0.25, 0.0], [0.0, 0.0, 0.0], [0.25, 0.25, 0.5]]


def test_counts_and_shares_stand_in_the_picture(tmp_path: Path, drawn: list[Figure]) -> None:
    path = tmp_path / "new" / "a.png"
    draw_confusion(np.array([[1234, 0, 7], [0, 0, 0], [5, 11, 13]]), ["bad", "so so", "good"], path, title="a title")
    assert min(png_size(path)) > 200
    shown_texts = texts(drawn[0])
    assert {"a title", "1,247 of 1,270 correct: 98.2 %", "1,234", "7", "5", "11", "13", "99 %", "45 %"} <= set(
        shown_texts
    )
    assert "0" not in shown_texts
    matrix = drawn[0].axes[0]
    assert [label.get_text() for label in matrix.get_yticklabels()] == ["bad", "so so", "good"]
    image = np.asarray(matrix.images[0].get_array())
    assert image[2].tolist() == pytest.approx([5 / 29, 11 / 29, 13 / 29])


def test_many_classes_stay_readable(tmp_path: Path, drawn: list[Figure]) -> None:
    draw = np.random.default_rng(3)
    confusion = draw.integers(0, 60, (45, 45)) * (draw.random((45, 45)) < 0.2)
    confusion[3, 4] = 123_456
    draw_confusion(confusion, [f"language {number}" for number in range(45)], tmp_path / "a.png", title="t")
    figure = drawn[0]
    figure.draw_without_rendering()  # type: ignore[no-untyped-call]
    counts = [text for text in figure.axes[0].texts if text.get_text().replace(",", "").isdigit()]
    assert len(counts) > 300
    assert "123,456" not in [text.get_text() for text in counts]  # it would not fit its cell
    assert all(text.get_fontsize() >= 4.5 for text in counts)
    cell = figure.axes[0].get_window_extent().width / 45
    assert all(text.get_window_extent().width <= cell for text in counts)
    assert max(png_size(tmp_path / "a.png")) < 3_000


def test_nothing_leaves_the_picture(tmp_path: Path, drawn: list[Figure]) -> None:
    for labels in (["a", "b"], ["x" * 90, "y"], [f"label {number}" for number in range(13)]):
        confusion = np.eye(len(labels), dtype=np.int64) * 17
        draw_confusion(confusion, labels, tmp_path / "a.png", title="a long title " * 3)
        figure = drawn[-1]
        figure.draw_without_rendering()  # type: ignore[no-untyped-call]
        for axes in figure.axes:
            for text in [*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels(), *figure.texts]:
                box = text.get_window_extent()
                assert box.x0 >= 0 and box.y0 >= 0
                assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text.get_text()


def test_names_that_matplotlib_would_not_draw_as_they_are(tmp_path: Path, drawn: list[Figure]) -> None:
    draw_confusion(np.eye(3, dtype=np.int64), ["$a$", "日本", "\\frac"], tmp_path / "a.png", title="$x$ and $y$")
    names = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert names == [r"\$a\$", r"\u65e5\u672c", r"\frac"]


def test_as_many_names_as_classes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a confusion matrix of 3 classes needs as many names, got 2"):
        draw_confusion(np.eye(3, dtype=np.int64), ["a", "b"], tmp_path / "a.png", title="t")
