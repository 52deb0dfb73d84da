"""Checkpoints appear whole or not at all, come back bit by bit, and tell when they were damaged."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.base.errors import InputError, RunFailure
from clearhead.checkpoints.runs import checkpoint as files
from tests.training.small import NextToken


def some_checkpoint(step: int = 7, *, ema: bool = True) -> files.Checkpoint:
    torch.manual_seed(step)
    module = NextToken()
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.tensor([[1, 2, 3]])).sum().backward()
    optimizer.step()
    average = {name: value + 1 for name, value in module.state_dict().items()} if ema else None
    return files.Checkpoint(step, module.state_dict(), optimizer.state_dict(), average, {"choices": {"threads": 1}})


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second) and first.dtype == second.dtype
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return type(first) is type(second) and len(first) == len(second) and all(map(same, first, second))
    return type(first) is type(second) and (first == second or first != first)


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_comes_back_bit_by_bit(tmp_path: Path) -> None:
    saved = some_checkpoint()
    folder = files.save_checkpoint(tmp_path, saved)
    loaded = files.load_checkpoint(folder)
    assert folder == tmp_path / "checkpoints" / "step-7"
    assert loaded.step == 7
    assert same(dict(loaded.weights), dict(saved.weights))
    assert same(dict(loaded.optimizer), dict(saved.optimizer))
    assert saved.ema is not None and loaded.ema is not None and same(dict(loaded.ema), dict(saved.ema))
    assert loaded.state == saved.state


def test_only_safetensors_and_json_are_written(tmp_path: Path) -> None:
    folder = files.save_checkpoint(tmp_path, some_checkpoint())
    assert listing(folder) == [
        "ema.safetensors", "manifest.json", "optimizer.safetensors", "state.json", "weights.safetensors",
    ]  # fmt: skip
    assert listing(tmp_path / "checkpoints") == ["step-7"]
    for path in folder.glob("*.json"):
        json.loads(path.read_text("utf-8"))


def test_all_files_of_a_checkpoint_have_the_same_rights(tmp_path: Path) -> None:
    folder = files.save_checkpoint(tmp_path, some_checkpoint())
    (tmp_path / "plain").write_text("")
    assert {path.stat().st_mode for path in folder.iterdir()} == {(tmp_path / "plain").stat().st_mode}


def test_values_of_an_optimizer_that_are_no_tensors_come_back(tmp_path: Path) -> None:
    """Such as the momentum of SGD that is not there yet, and state under both kinds of names."""
    groups = [{"lr": 0.1, "betas": (0.9, 0.98), "params": [0, 2], "matrices": True, "foreach": None}]
    optimizer = {"state": {0: {"momentum_buffer": None, "step": 3}, 2: {"a.b": torch.ones(2)}}, "param_groups": groups}
    saved = files.Checkpoint(1, {"w": torch.zeros(1)}, optimizer, None, {})
    assert same(dict(files.load_checkpoint(files.save_checkpoint(tmp_path, saved)).optimizer), optimizer)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


FILES = ["weights.safetensors", "optimizer.safetensors", "ema.safetensors", "state.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "words"),
    [(cut_off, "cut off"), (alter, "altered"), (lengthen, "too long"), (Path.unlink, "missing")],
)
def test_a_damaged_file_is_named_and_the_checkpoint_skipped(
    tmp_path: Path, name: str, damage: Callable[[Path], None], words: str
) -> None:
    older = files.save_checkpoint(tmp_path, some_checkpoint(3))
    newer = files.save_checkpoint(tmp_path, some_checkpoint(9))
    assert files.find_newest_undamaged(tmp_path) == (newer, [])
    damage(newer / name)
    newest, skipped = files.find_newest_undamaged(tmp_path)
    assert newest == older
    assert len(skipped) == 1 and name in skipped[0] and words in skipped[0] and "step-9" in skipped[0]
    with pytest.raises(InputError, match=name):
        files.load_checkpoint(newer)


@pytest.mark.parametrize("damage", [cut_off, alter, Path.unlink])
def test_a_damaged_manifest_makes_the_checkpoint_unsound(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = files.save_checkpoint(tmp_path, some_checkpoint())
    damage(folder / "manifest.json")
    assert files.checkpoint_damage(folder) is not None
    assert files.find_newest_undamaged(tmp_path)[0] is None


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        (
            "manifest.json",
            '{"name": "step-7", "files": {"state.json": {"size": 1e999, "sha256": ""}}}',
            "cannot be read",
        ),
        ("manifest.json", '{"a":' * 500 + "1" + "}" * 500, "cannot be read"),
        ("manifest.json", '{"name": "step-7", "files": {}}', "does not list optimizer.safetensors"),
        ("ema.safetensors", "a file that nobody saved", "does not list ema.safetensors"),
    ],
)
def test_a_manifest_lists_all_that_must_be_there_or_the_checkpoint_is_passed_over(
    tmp_path: Path, file: str, text: str, words: str
) -> None:
    older = files.save_checkpoint(tmp_path, some_checkpoint(3, ema=False))
    newer = files.save_checkpoint(tmp_path, some_checkpoint(7, ema=False))
    (newer / file).write_text(text)
    newest, skipped = files.find_newest_undamaged(tmp_path)
    assert newest == older and len(skipped) == 1 and words in skipped[0]


def test_a_manifest_names_no_file_outside(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("x")
    folder = files.save_checkpoint(tmp_path, some_checkpoint(7))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["../../outside"] = {"size": 1, "sha256": "0" * 64}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "which is outside" in str(files.checkpoint_damage(folder))


def test_weights_are_loaded_whatever_became_of_the_optimizer(tmp_path: Path) -> None:
    folder = files.save_checkpoint(tmp_path, some_checkpoint(7))
    alter(folder / "optimizer.safetensors")
    assert files.weights_damage(folder) is None and files.checkpoint_damage(folder) is not None
    alter(folder / "ema.safetensors")
    assert files.weights_damage(folder) is not None


def test_a_checkpoint_under_another_step_is_unsound(tmp_path: Path) -> None:
    folder = files.save_checkpoint(tmp_path, some_checkpoint(7))
    folder.rename(folder.with_name("step-8"))
    assert "belongs to step-7" in str(files.checkpoint_damage(folder.with_name("step-8")))


def test_steps_are_ordered_as_numbers_and_strangers_are_ignored(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        files.save_checkpoint(tmp_path, some_checkpoint(step))
    for name in ("step-x", "averaged", ".step-5.writing-1", "step-007"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "step-55").write_text("a file")
    assert files.checkpoint_steps(tmp_path) == [9, 10, 100]
    assert files.checkpoint_steps(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("newest", "keep", "best", "left"),
    [
        (40, 2, None, [30, 40, 50]),
        (40, 2, 10, [10, 30, 40, 50]),
        (50, 1, 50, [50]),
        (50, 9, 20, [10, 20, 30, 40, 50]),
        (30, 1, 20, [20, 30, 40, 50]),
    ],
)
def test_the_last_ones_and_the_best_are_kept(
    tmp_path: Path, newest: int, keep: int, best: int | None, left: list[int]
) -> None:
    for step in (10, 20, 30, 40, 50):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    files.prune_checkpoints(tmp_path, newest=newest, keep=keep, best=best)
    assert files.checkpoint_steps(tmp_path) == left
    assert listing(tmp_path / "checkpoints") == sorted(f"step-{step}" for step in left)


def test_the_best_step_is_a_word_in_a_file(tmp_path: Path) -> None:
    assert files.read_best(tmp_path) is None
    files.write_best(tmp_path, 120)
    assert (tmp_path / "best").read_text() == "step-120\n"
    assert files.read_best(tmp_path) == 120
    (tmp_path / "best").write_text("nonsense")
    assert files.read_best(tmp_path) is None


@pytest.mark.parametrize("failing", range(1, 8))
def test_a_full_disk_leaves_the_last_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The disk fills up at the first, second, ... sync of the save."""
    before = files.save_checkpoint(tmp_path, some_checkpoint(1))
    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailure, match=r"step-2 could not be saved: the disk is full.*earlier checkpoints"):
        files.save_checkpoint(tmp_path, some_checkpoint(2))
    # Four files, the manifest, their folder, and last the list of folders: by then the new name is there
    assert listing(tmp_path / "checkpoints") == ["step-1"] + ["step-2"] * (failing == 7)
    assert files.checkpoint_damage(before) is None


def test_a_first_checkpoint_that_fails_offers_nothing_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailure, match=r"the disk is full; no step was taken: make room there, or name another"):
        files.save_checkpoint(tmp_path, some_checkpoint(0))
    assert not list((tmp_path / "checkpoints").iterdir())


REFUSED_WRITE = """
import resource, sys
from pathlib import Path
from tests.checkpoints.runs.test_checkpoint import files, some_checkpoint, RunFailure, listing
run = Path(sys.argv[1])
files.save_checkpoint(run, some_checkpoint(1))
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
for limit in (100, 900):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    try:
        files.save_checkpoint(run, some_checkpoint(2))
    except RunFailure as error:
        found, skipped = files.newest_sound(run)
        assert listing(run / "checkpoints") == ["step-1"] and not skipped, listing(run / "checkpoints")
        print(error)
"""


def test_a_write_that_the_system_refuses_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    """A real refusal by the system, inside the safetensors library (100 bytes) or later, in the JSON files."""
    command = [sys.executable, "-c", REFUSED_WRITE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step-2 could not be saved: File too large") == 2, done.stdout


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    folder = files.save_checkpoint(tmp_path, some_checkpoint(4))
    alter(folder / "weights.safetensors")
    files.save_checkpoint(tmp_path, some_checkpoint(4, ema=False))
    assert files.checkpoint_damage(folder) is None
    assert files.load_checkpoint(folder).ema is None
    assert listing(tmp_path / "checkpoints") == ["step-4"]


def test_leftovers_of_a_killed_process_are_cleared(tmp_path: Path) -> None:
    folder = files.save_checkpoint(tmp_path, some_checkpoint(4))
    other = files.save_checkpoint(tmp_path, some_checkpoint(5))
    # Killed between the two renames of a replacement, while writing, and while deleting
    folder.rename(folder.with_name(".step-4.replaced"))
    (tmp_path / "checkpoints" / ".step-5.replaced").mkdir()
    (tmp_path / "checkpoints" / ".step-6.writing-99").mkdir()
    (tmp_path / "checkpoints" / ".step-2.removing").mkdir()
    (tmp_path / ".best.writing-99").write_text("step-")
    files.clear_leftovers(tmp_path)
    assert listing(tmp_path / "checkpoints") == ["step-4", "step-5"]
    assert listing(tmp_path) == ["checkpoints"]
    assert files.checkpoint_damage(folder) is None and files.checkpoint_damage(other) is None


def test_the_choices_of_a_run_are_read_from_its_newest_sound_checkpoint(tmp_path: Path) -> None:
    assert files.read_choices(tmp_path) is None
    files.save_checkpoint(tmp_path, some_checkpoint(4))
    assert files.read_choices(tmp_path) == {"threads": 1}
