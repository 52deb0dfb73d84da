"""Exact resume: killed at random moments, also in mid-write, a run ends with the very bits of the run left alone."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.base.errors import InputError
from clearhead.checkpoints.runs import checkpoint as files
from clearhead.checkpoints.runs.metrics import read_metrics
from tests.checkpoints.runs.test_checkpoint import same
from tests.training.resume_job import STEPS, chain_trainer, real_trainer, write_reversed_words
from tests.training.small import equal_states
from tests.training.test_loop import same_metrics
from tests.training.test_snapshots import snapshots

pytestmark = pytest.mark.slow


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.training.resume_job", *arguments]
    # The killed run and the whole one hash strings differently, so that an order taken from a set would show
    environment = os.environ | {"PYTHONHASHSEED": "random"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    return out


def assert_same_end(first: Path, second: Path, step: int) -> None:
    ends = [files.load_checkpoint(files.checkpoint_folder(run, step)) for run in (first, second)]
    for file_name in ("weights", "ema", "optimizer"):
        assert same(dict(getattr(ends[0], file_name)), dict(getattr(ends[1], file_name))), file_name
    for key in ("schedule", "batches", "random", "ema_updates", "choices"):
        assert ends[0].state[key] == ends[1].state[key], key
    tallies = [{k: v for k, v in end.state["tally"].items() if "seconds" not in k} for end in ends]
    assert tallies[0] == tallies[1]
    for name in ("weights.safetensors", "average.json"):
        contents = [(run / "checkpoints" / "averaged" / name).read_bytes() for run in (first, second)]
        assert contents[0] == contents[1], name
    assert (first / "best").read_text() == (second / "best").read_text()
    assert files.checkpoint_steps(first) == files.checkpoint_steps(second)
    assert same(snapshots(first), snapshots(second))
    assert same_metrics(first, second)


def test_killed_twice_and_resumed_the_weights_are_bit_identical(tmp_path: Path) -> None:
    moments = random.SystemRandom()
    moment, write = moments.uniform(0.0, 1.5), moments.randint(10, 60)
    write_reversed_words(tmp_path)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    undisturbed = start("whole", str(whole))
    reached, messages = finish(start("killed", str(killed), str(moment), str(write))).splitlines()
    finish(undisturbed)

    where = (
        f"killed {moment:.2f} s after the first checkpoint (at step {reached}), then at write {write} of the next part"
    )
    assert messages.startswith("['training ended after step 28 and ") and messages.count("'") == 2, messages
    try:
        assert_same_end(whole, killed, STEPS)
    except AssertionError as error:
        error.add_note(where)
        raise
    assert [row.step for row in read_metrics(killed / "metrics.jsonl")] == list(range(1, STEPS + 1)), where


def test_killed_in_the_middle_of_any_write_the_end_is_the_same(tmp_path: Path) -> None:
    """Many deaths, each at a random write: checkpoint, manifest, rename, metrics, best, recent weights."""
    seed = random.SystemRandom().randrange(10**6)
    out = finish(start("chain", str(tmp_path / "killed"), str(seed)))
    assert int(out) >= 2, f"seed {seed}"
    try:
        assert_same_end(tmp_path / "killed-whole", tmp_path / "killed", 14)
    except AssertionError as error:
        error.add_note(f"seed {seed}, {out.strip()} deaths")
        raise
    left = [path.name for path in (tmp_path / "killed").rglob(".*")]
    assert not left, "a finished run leaves nothing half-written"


def test_a_run_in_bf16_is_resumed_with_the_same_bits(tmp_path: Path) -> None:
    write_reversed_words(tmp_path)
    real_trainer(tmp_path / "whole", steps=6, precision="bf16").run()
    real_trainer(tmp_path / "parted", steps=3, precision="bf16").run()
    real_trainer(tmp_path / "parted", steps=6, precision="bf16").run(resume=True)
    ends = [files.load_checkpoint(files.checkpoint_folder(tmp_path / run, 6)) for run in ("whole", "parted")]
    for file_name in ("weights", "ema", "optimizer"):
        assert same(dict(getattr(ends[0], file_name)), dict(getattr(ends[1], file_name))), file_name


def test_the_test_can_fail(tmp_path: Path) -> None:
    """Without the random state of the checkpoint the end is another one."""
    run = tmp_path / "run"
    trainer = chain_trainer(run)
    trainer.run()
    path = files.checkpoint_folder(run, 12)
    saved = files.load_checkpoint(path)
    state = dict(saved.state) | {"random": files.load_checkpoint(files.checkpoint_folder(run, 14)).state["random"]}
    files.save_checkpoint(run, files.Checkpoint(12, saved.weights, saved.optimizer, saved.ema, state))
    files.remove_folder(files.checkpoint_folder(run, 14))
    before = {name: value.clone() for name, value in trainer.module.state_dict().items()}
    other = chain_trainer(run)
    other.run(resume=True)
    assert not equal_states(before, dict(other.module.state_dict()))


def _set(path: str, value: object) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(state: dict[str, Any], optimizer: dict[str, Any]) -> None:
        *holders, key = path.split(".")
        holder = {"state": state, "optimizer": optimizer}
        for name in holders:
            holder = holder[int(name) if name.isdecimal() else name]
        holder[key] = value

    return change


@pytest.mark.parametrize(
    "alter",
    [
        _set("state.tally", {"step": -1, "more": 0}),
        _set("state.tally.recent", ["a"]),
        _set("state.random.torch", "AAAA"),
        _set("state.random.numpy", [1]),
        _set("state.random", None),
        _set("state.schedule", 0),
        _set("state.choices.threads", 10**9),
        _set("state.environment", []),
        _set("optimizer.param_groups", []),
        _set("optimizer.state.0.exp_avg", torch.zeros(2, 3, 5)),
        _set("optimizer.state.0.more", 1),
    ],
)
def test_an_altered_state_is_refused_before_a_file_changes(
    tmp_path: Path, alter: Callable[[dict[str, Any], dict[str, Any]], None]
) -> None:
    run = tmp_path / "run"
    trainer = chain_trainer(run)
    trainer.run()
    step = files.checkpoint_steps(run)[-1]
    saved = files.load_checkpoint(files.checkpoint_folder(run, step))
    state, optimizer = dict(saved.state), dict(saved.optimizer)
    alter(state, optimizer)
    files.save_checkpoint(run, files.Checkpoint(step, saved.weights, optimizer, saved.ema, state))
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(InputError):
        chain_trainer(run).run(resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
