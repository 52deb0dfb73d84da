"""Pictures of attention: every cell has its colour, every label is drawn, whatever the tokens are."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.image import imread

from clearhead.base.errors import InputError
from clearhead.base.figures import label_text
from clearhead.interpret.view import attention as pictures
from clearhead.interpret.view.attention import StackThumbnails, draw_matrix, draw_overview

QUERIES, KEYS = ["a", "$x$", "字", " "], ["</s>", "Ġthe", "\n", "<script>", "\u200fשלום", "b", "c"]


def weights(rows: int = 4, columns: int = 7) -> np.ndarray:
    return np.random.default_rng(3).dirichlet(np.ones(columns), size=rows)


def test_labels_show_what_is_invisible_and_escape_what_the_font_lacks() -> None:
    assert [label_text(text, 24) for text in QUERIES] == ["a", r"\$x\$", r"\u5b57", "␣"]
    assert label_text("\n", 24) == r"\n" and label_text("\t ", 24) == r"\t\u2423"
    assert label_text("abcdef", 4) == "abc…"


def test_the_cells_of_a_matrix_have_the_colours_of_the_weights(tmp_path: Path) -> None:
    """The darkest blue is where the weight is 1."""
    shown_weights = np.zeros((4, 7))
    shown_weights[np.arange(4), [2, 6, 0, 5]] = 1.0
    draw_matrix(shown_weights, QUERIES, KEYS, tmp_path / "head.png", title="a $ title")
    blue = np.array(matplotlib.colormaps["Blues"](1.0)[:3])
    is_dark = (np.abs(imread(tmp_path / "head.png")[..., :3] - blue) < 0.01).all(-1)
    is_dark = is_dark[: -int(0.7 * 150)]  # without the colour scale
    cell = 0.25 * 150
    assert abs(is_dark.sum() - 4 * cell**2) < 0.2 * 4 * cell**2
    columns = [np.flatnonzero(row).mean() for row in is_dark if row.any()]
    order = [columns[int((index + 0.5) * len(columns) / 4)] for index in range(4)]
    assert np.argsort(order).tolist() == np.argsort([2, 6, 0, 5]).tolist()


def test_an_svg_is_xml_and_always_the_same(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        draw_matrix(weights(), QUERIES, KEYS, tmp_path / name, title="<&>")
    content = (tmp_path / "one.svg").read_bytes()
    assert content == (tmp_path / "two.svg").read_bytes()
    assert ElementTree.fromstring(content).tag.endswith("svg")
    assert b"<script" not in content


def test_an_overview_has_every_head(tmp_path: Path) -> None:
    """Layers may have different numbers of heads, and texts of any length."""
    heads = [np.stack([weights(rows, 7)] * count) for rows, count in ((4, 3), (4, 2))]
    stacks = [StackThumbnails("decoder.self", [0, 5], heads), StackThumbnails("decoder.memory", [1], heads[:1])]
    draw_overview(stacks, tmp_path / "new" / "overview.svg", title="all heads")
    content = (tmp_path / "new" / "overview.svg").read_text()
    assert content.count("<image ") == 3 + 2 + 3 + 1  # the last is the colour scale


def test_a_long_text_has_fewer_labels_and_no_end(tmp_path: Path) -> None:
    labels = pictures._labels(["a"] * 300, 24 / 300)
    assert 60 <= sum(map(bool, labels)) <= 120
    with pytest.raises(InputError, match="at most 2,000 tokens on a side, and this text has 2,001"):
        draw_matrix(weights(1, 2001), ["a"], ["b"] * 2001, tmp_path / "x.png", title="x")
    with pytest.raises(InputError, match="neither: give another name"):
        draw_matrix(weights(), QUERIES, KEYS, tmp_path / "x.pdf", title="x")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        draw_matrix(weights(), QUERIES, KEYS, tmp_path / "file" / "x.png", title="x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
