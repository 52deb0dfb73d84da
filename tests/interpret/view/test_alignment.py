"""The picture is written, grows with the tokens and knows which letters the font has."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from clearhead.base.figures import drawable
from clearhead.interpret.view.alignment import AlignmentHeatMap, draw_alignments


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return int(width), int(height)


def sample(target: int, source: int) -> AlignmentHeatMap:
    weights = np.random.default_rng(7).dirichlet(np.ones(source), size=target)
    return AlignmentHeatMap(weights, ["a"] * (source - 1) + ["</s>"], ["b"] * target, "a title")


def test_picture_grows_with_its_tokens(tmp_path: Path) -> None:
    sizes = {}
    for target, source in [(5, 31), (5, 47), (11, 31)]:
        path = tmp_path / "new folder" / f"{target}-{source}.png"
        draw_alignments([sample(target, source)], path, title="heads")
        sizes[target, source] = png_size(path)
    assert sizes[5, 47][0] > sizes[5, 31][0]
    assert sizes[11, 31][1] > sizes[5, 31][1]


def test_several_alignments_share_a_picture(tmp_path: Path) -> None:
    draw_alignments([sample(5, 31)], tmp_path / "1.png", title="heads")
    draw_alignments([sample(5, 31), sample(7, 37), sample(3, 29)], tmp_path / "3.png", title="heads")
    single, three = png_size(tmp_path / "1.png"), png_size(tmp_path / "3.png")
    assert three[0] > 1.7 * single[0]
    assert three[1] > 1.3 * single[1]


def test_drawable_knows_the_font() -> None:
    assert drawable("Donnerstag, 4. März 2021")
    assert drawable("четверг, 4 марта 2021")
    assert not drawable("2021年3月4日")
