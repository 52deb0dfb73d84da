"""Pictures of the README and of the site show the present program."""

from __future__ import annotations

import base64
import importlib.util
import io
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image

from tests.house.source import ROOT

IMAGES = ROOT / "docs" / "images"


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs" / "make_pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_picture_is_made_by_the_script_or_recorded(pictures: ModuleType) -> None:
    names = {path.name for path in IMAGES.iterdir()}
    assert names == {*pictures.SOURCES, pictures.ARCHITECTURE, *pictures.RECORDED}
    pages = [path.read_text("utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]]
    for name in names:
        assert any(f"images/{name})" in page for page in pages), f"no page shows {name}"
    for name, command in pictures.RECORDED.items():
        assert all(command in page for page in pages if f"images/{name})" in page)
    assert all((IMAGES / name).stat().st_size <= 500_000 for name in names)


def test_the_sources_of_each_picture_are_those_of_today(pictures: ModuleType) -> None:
    old = [name for name in pictures.SOURCES if pictures.read_digest(IMAGES / name) != pictures.digest(name)]
    assert not old, f"older than their sources: {old}; run make pictures, and look at them"


def test_the_digest_follows_the_sources(pictures: ModuleType, tmp_path: Path) -> None:
    for source in ("docs/make_pictures.py", f"{pictures.EXPLORER}/app.js", f"{pictures.EXPLORER}/style.css"):
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).write_bytes((ROOT / source).read_bytes())
    before = pictures.digest("explorer.png", tmp_path)
    assert before == pictures.digest("explorer.png", tmp_path) != pictures.digest("learning-to-align.svg", tmp_path)
    (tmp_path / pictures.EXPLORER / "style.css").write_text("body { color: red }")
    assert pictures.digest("explorer.png", tmp_path) != before


def test_the_picture_of_the_architecture_is_drawn_by_the_command(pictures: ModuleType) -> None:
    assert pictures.draw_architecture() == (IMAGES / pictures.ARCHITECTURE).read_text("utf-8")


def test_the_training_is_drawn_as_it_was(pictures: ModuleType) -> None:
    """Check that each frame has the step, the text and the weights of its snapshot, and that one frame is visible."""
    generator = torch.Generator().manual_seed(1)
    frames = [
        pictures.Frame(step, text, torch.rand(2, 4, 3, 5, generator=generator))
        for step, text in ((0, "<&"), (9, "1998-01-05"))
    ]
    svg = pictures.draw_training(frames, ["1", " ", "</s>"], list("Mo <&"))
    root = ElementTree.fromstring(svg)
    groups = root.findall("{*}g")
    assert len(groups) == 2
    for frame, group in zip(frames, groups, strict=True):
        assert f"step {frame.step}: it writes {frame.written}" in "".join(group.itertext())
        large, *thumbnails = group.findall("{*}image")
        shown = [weights(image.attrib["href"]) for image in thumbnails]
        wanted = frame.weights_LHQK.flatten(0, 1)
        assert len(shown) == 8 and torch.allclose(torch.stack(shown), wanted, atol=0.01)
        assert torch.allclose(
            weights(large.attrib["href"]), frame.weights_LHQK[pictures.LAYER, pictures.HEAD], atol=0.01
        )
    assert re.findall(r"^#f(\d)\{animation:k\d", svg, re.MULTILINE) == ["0", "1"] and "#f1{opacity:1}" in svg


def weights(href: str) -> torch.Tensor:
    """Return the weights that an image shows by its opacity."""
    with Image.open(io.BytesIO(base64.b64decode(href.partition("base64,")[2]))) as image:
        alpha = image.getchannel("A")
        values = torch.tensor(list(alpha.tobytes()), dtype=torch.float32).view(alpha.height, alpha.width)
    return (values / 255) ** (1 / 0.7)
