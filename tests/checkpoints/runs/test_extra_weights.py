"""Snapshots are of steps that depend on the step alone, and are found like checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from clearhead.base.errors import InputError
from clearhead.checkpoints.runs import checkpoint as files
from clearhead.checkpoints.runs.extra_weights import (
    cut_back_snapshots,
    is_snapshot_step,
    prune_snapshots,
    snapshot_folder,
)
from tests.checkpoints.runs.test_checkpoint import some_checkpoint
from tests.checkpoints.runs.test_directory import weights_of


def steps_of(count: int, last: int) -> list[int]:
    return [step for step in range(last + 1) if is_snapshot_step(step, count)]


def test_ten_snapshots_are_spaced_like_a_logarithm() -> None:
    assert steps_of(10, 5000) == [0, 1, 2, 5, 10, 22, 46, 100, 215, 464, 1000, 2154, 4642]
    assert steps_of(1, 5000) == [0] and steps_of(0, 5000) == []


@pytest.mark.parametrize("count", [2, 3, 7, 11, 29, 101, 307])
def test_the_steps_are_the_rounded_powers_of_one_number(count: int) -> None:
    base = 1000 ** (1 / (count - 1))
    powers = {round(base**exponent) for exponent in range(math.ceil(math.log(3000, base)))}
    assert set(steps_of(count, 3000)) == {0} | {step for step in powers if step <= 3000}


@pytest.mark.parametrize(("keep", "left"), [(5, [0, 2, 3, 5, 8]), (3, [0, 5, 8]), (1, [0]), (9, [0, 1, 2, 3, 5, 8])])
def test_the_newest_stay_and_step_0(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in (0, 1, 2, 3, 5, 8):
        snapshot_folder(tmp_path, step).mkdir(parents=True)
    prune_snapshots(tmp_path, newest=8, keep=keep)
    assert files.steps_in(files.snapshots_folder(tmp_path)) == left
    cut_back_snapshots(tmp_path, 3)
    assert files.steps_in(files.snapshots_folder(tmp_path)) == [step for step in left if step <= 3]


@pytest.mark.parametrize(("newest", "left"), [(3, [0, 2, 3, 5, 8]), (6, [0, 3, 5, 8]), (0, [0, 5, 8]), (8, [0, 5, 8])])
def test_as_many_stay_up_to_the_last_checkpoint(tmp_path: Path, newest: int, left: list[int]) -> None:
    for step in (0, 1, 2, 3, 5, 8):
        snapshot_folder(tmp_path, step).mkdir(parents=True)
    prune_snapshots(tmp_path, newest=newest, keep=3)
    assert files.steps_in(files.snapshots_folder(tmp_path)) == left


def test_a_step_is_its_checkpoint_or_else_its_snapshot(tmp_path: Path) -> None:
    for step in (3, 5):
        files.save_checkpoint(tmp_path, some_checkpoint(step))
        files.link_weights(tmp_path, step, snapshot_folder(tmp_path, step))
    files.remove_folder(files.checkpoint_folder(tmp_path, 3))
    assert weights_of(f"{tmp_path}@step-3") == snapshot_folder(tmp_path, 3) / "weights.safetensors"
    assert weights_of(f"{tmp_path}@step-5") == files.checkpoint_folder(tmp_path, 5) / "ema.safetensors"
    with pytest.raises(InputError, match=r"no checkpoint of step 4; the steps it kept are: 3, 5"):
        weights_of(f"{tmp_path}@step-4")


def test_a_damaged_snapshot_is_left_out(tmp_path: Path) -> None:
    for step in (2, 7):
        files.save_checkpoint(tmp_path, some_checkpoint(step, ema=False))
        files.link_weights(tmp_path, step, snapshot_folder(tmp_path, step))
    (snapshot_folder(tmp_path, 2) / files.WEIGHTS).unlink()
    assert list(files.find_undamaged_weights(files.snapshots_folder(tmp_path))) == [7]
    both = files.snapshots_folder(tmp_path), tmp_path / "checkpoints"
    assert list(files.find_undamaged_weights(*both)) == [2, 7]
    (files.checkpoint_folder(tmp_path, 7) / files.WEIGHTS).unlink()
    assert files.find_undamaged_weights(*both)[7].parent == snapshot_folder(tmp_path, 7), (
        "in place of a damaged checkpoint"
    )
