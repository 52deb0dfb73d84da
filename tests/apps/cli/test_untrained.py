"""A head that nothing has trained never answers, and a start that lacks weights is no start."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import clearhead as ch
from clearhead.checkpoints.weights.files import load_tensors, save_tensors
from clearhead.training.init_from import find_initial_model, take_weights
from clearhead.training.progress.reports import TrainingProgress


@pytest.mark.parametrize("kind", ["classify", "tag", "answer"])
def test_the_beginning_of_a_run_is_not_asked(runs: Callable[[str], Path], kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs(kind), run)
    with pytest.raises(ch.InputError, match="head is untrained"):
        ch.load(f"{run}@step-0")


def test_a_start_without_some_of_its_weights_is_refused(runs: Callable[[str], Path], tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    model = ch.load(runs("generate"))
    model.save(saved)
    file = saved / "weights.safetensors"
    tensors = dict(load_tensors(file))
    gone = next(name for name in tensors if "query" in name)
    remaining = {name: tensor.clone() for name, tensor in tensors.items() if name != gone}
    del tensors
    file.unlink()
    save_tensors(file, remaining)
    (saved / "manifest.json").unlink()
    start = find_initial_model(str(saved), None, None)
    assert start is not None
    with pytest.raises(ch.InputError, match=f"'{gone}' is missing"):
        take_weights(ch.build(model.spec), start, start.record, TrainingProgress())
