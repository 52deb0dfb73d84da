"""A run keeps the weights of some steps, the same ones however often it is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

from clearhead.checkpoints.runs import checkpoint as files
from clearhead.checkpoints.runs import extra_weights as weight_files
from clearhead.checkpoints.runs.extra_weights import snapshot_folder
from clearhead.training.record import TrainSettings, num_snapshots
from tests.checkpoints.runs.test_checkpoint import same
from tests.training.small import Tokens, small_trainer, sum_loss


def snapshots(run: Path) -> dict[int, dict[str, Tensor]]:
    """The weights of every snapshot, all of which must be sound."""
    paths = files.find_undamaged_weights(files.snapshots_folder(run))
    assert list(paths) == files.steps_in(files.snapshots_folder(run))
    return {step: files.load_tensors(file) for step, file in paths.items()}


def test_snapshots_are_the_weights_of_their_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    small_trainer(run, steps=24, validate_every=1, keep=99).run()
    assert list(snapshots(run)) == [0, 1, 2, 5, 10, 22]
    small_trainer(tmp_path / "seldom", steps=24, validate_every=24).run()
    assert same(snapshots(tmp_path / "seldom"), snapshots(run)), "with a checkpoint or without one"
    saved = files.load_tensors(files.checkpoint_folder(run, 22) / files.WEIGHTS)
    assert same(snapshots(run)[22], saved)


def test_the_oldest_go_but_not_step_0(tmp_path: Path) -> None:
    small_trainer(tmp_path / "run", steps=24, snapshots=4).run()
    assert list(snapshots(tmp_path / "run")) == [0, 1, 10]
    small_trainer(tmp_path / "more", steps=24, snapshots=20).run()
    assert list(snapshots(tmp_path / "more")) == [0, 1, 2, 3, 4, 6, 9, 13, 18]
    small_trainer(tmp_path / "none", steps=24, snapshots=0).run()
    assert not files.snapshots_folder(tmp_path / "none").exists()


def test_an_exponential_average_is_kept_in_place_of_the_weights(tmp_path: Path) -> None:
    small_trainer(tmp_path / "run", steps=5, ema=0.9, validate_every=5).run()
    average = files.load_tensors(files.checkpoint_folder(tmp_path / "run", 5) / files.AVERAGED_WEIGHTS)
    saved = snapshots(tmp_path / "run")
    assert same(saved[5], average) and 2 in saved, "a step without a checkpoint"


@pytest.mark.parametrize("stop", [1, 5, 9, 10])
def test_a_resumed_run_keeps_those_of_one_that_went_on(tmp_path: Path, stop: int) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    small_trainer(whole, steps=24, ema=0.8).run()
    small_trainer(parts, steps=stop, ema=0.8).run()
    small_trainer(parts, steps=24, ema=0.8).run(resume=True)
    assert same(snapshots(parts), snapshots(whole))


def test_a_run_that_goes_back_and_stops_has_those_of_one_that_stopped_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "SNAPSHOT_SPAN", 8)  # steps 1, 3, 8, 23, of which the last two are kept
    whole, parts, calls = tmp_path / "whole", tmp_path / "parts", iter(range(9))

    def killing_loss(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        if next(calls) == 8:
            raise KeyboardInterrupt
        return sum_loss(module, batch)

    with pytest.raises(KeyboardInterrupt):
        small_trainer(parts, steps=99, snapshots=3, validate_every=5, loss=killing_loss).run()
    assert files.checkpoint_steps(parts)[-1] == 5 and list(snapshots(parts)) == [0, 1, 3, 8]
    small_trainer(parts, steps=7, snapshots=3, validate_every=5).run(resume=True)
    small_trainer(whole, steps=7, snapshots=3, validate_every=5).run()
    assert list(snapshots(whole)) == [0, 1, 3] and same(snapshots(parts), snapshots(whole))
    small_trainer(parts, steps=10, snapshots=3, validate_every=5).run(resume=True)
    assert list(snapshots(parts)) == [0, 3, 8]


def test_snapshots_of_a_lost_future_are_dropped(tmp_path: Path) -> None:
    """Going back to an older checkpoint takes the snapshots back as well; what follows writes them anew."""
    run = tmp_path / "run"
    small_trainer(run, steps=12, validate_every=3).run()
    (files.checkpoint_folder(run, 12) / files.WEIGHTS).write_bytes(b"")
    before = snapshots(run)
    (snapshot_folder(run, 10) / files.WEIGHTS).write_bytes(b"of another future")
    small_trainer(run, steps=12, validate_every=3).run(resume=True)
    assert same(snapshots(run), before) and 10 in before


def test_a_start_that_took_no_step_leaves_none(tmp_path: Path) -> None:
    run = tmp_path / "run"
    small_trainer(run, steps=4).run()
    for step in (files.checkpoint_steps(run))[1:]:
        files.remove_folder(files.checkpoint_folder(run, step))
    small_trainer(run, steps=1).run()
    assert list(snapshots(run)) == [0, 1]


def test_large_weights_have_fewer(tmp_path: Path) -> None:
    module = nn.Linear(1000, 500, bias=False)
    settings = TrainSettings(run=str(tmp_path), steps=9, snapshots=10, snapshot_megabytes=7)
    assert num_snapshots(settings, module) == 3, "of 2 MB each"
    assert num_snapshots(settings, nn.Linear(10, 10)) == 10
    assert num_snapshots(settings, nn.Linear(1000, 5000)) == 0
