"""Training accepts the run files in examples/, and their data has the form that they describe."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from clearhead.training.runfile.read import load_run_file

EXAMPLES = Path(__file__).parents[2] / "examples"


def script(name: str) -> ModuleType:
    """Import a script of examples/ by its path."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.stem)
def test_it_is_accepted_and_explained(file: Path) -> None:
    run_file = load_run_file(file)
    assert run_file.train.run == f"runs/{file.stem}"
    text = file.read_text(encoding="utf-8")
    assert f"clearhead train examples/{file.name}" in text and text.count("#") > 6


def test_every_run_file_says_its_task_and_fits_the_results_page() -> None:
    """Check that each recipe has a recorded result, and each result a recipe."""
    results = (EXAMPLES.parent / "docs" / "results.md").read_text(encoding="utf-8")
    for file in EXAMPLES.glob("*.toml"):
        assert f"examples/{file.name}" in results, file.name


@pytest.mark.parametrize("task", ["copy", "reverse"])
def test_strings(task: str, tmp_path: Path) -> None:
    module = script("make_strings")
    module.make_strings(task, tmp_path)
    parts = {}
    for split in ("train", "valid", "test", "longer"):
        sources, targets = (
            (tmp_path / f"{split}.{side}").read_text(encoding="utf-8").splitlines() for side in ("source", "target")
        )
        assert targets == (sources if task == "copy" else [line[::-1] for line in sources])
        parts[split] = {line.replace(" ", "") for line in sources}
    assert not parts["train"] & parts["test"] and not parts["train"] & parts["valid"]
    assert {len(text) for text in parts["train"]} == set(module.TRAINED_LENGTHS)
    assert min(map(len, parts["longer"])) > max(module.TRAINED_LENGTHS)


def test_strings_are_the_same_every_time(tmp_path: Path) -> None:
    module = script("make_strings")
    for name in ("a", "b"):
        module.make_strings("copy", tmp_path / name)
    assert all((tmp_path / "b" / file.name).read_bytes() == file.read_bytes() for file in (tmp_path / "a").iterdir())
