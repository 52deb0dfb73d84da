"""`clearhead new` writes a run file that training accepts, and never over anything."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from clearhead.apps.cli.main import main
from clearhead.apps.cli.new import UNFINISHED
from clearhead.training.runfile.read import load_run_file
from tests.apps.cli.tiny_run import PAIRS, write_pairs

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write pairs and name them; the tests run in their folder."""
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path, "train", PAIRS)
    return ["new", "translate", "--source", "train.source", "--target", "train.target"]


def test_validation_is_held_out_where_there_is_none(
    data: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*data, "--json"]) == 0
    captured = capfd.readouterr()

    def lines(name: str) -> list[str]:
        return (tmp_path / "run-data" / name).read_text(encoding="utf-8").splitlines()

    train = list(zip(lines("train.source"), lines("train.target"), strict=True))
    valid = list(zip(lines("valid.source"), lines("valid.target"), strict=True))
    assert sorted(train + valid) == sorted(PAIRS) and 2 <= len(valid) <= 12
    # Each target belongs to five sources.
    assert {target for _, target in train}.isdisjoint(target for _, target in valid)
    assert f"held out {len(valid)} pairs" in captured.err and "125 pairs share a text with another one" in captured.err
    record = json.loads(captured.out)
    expected = {"file": "run.toml", "run": "runs/source-target", "steps": 30, "pairs": len(PAIRS)}
    assert record == {**expected, "held_out": len(valid)}
    written = load_run_file(tmp_path / "run.toml")
    assert written.data.train.model_dump() == {"source": "run-data/train.source", "target": "run-data/train.target"}


def test_force_replaces_the_run_file_and_its_held_out_data(data: list[str], tmp_path: Path) -> None:
    file, held_out = tmp_path / "run.toml", tmp_path / "run-data" / "valid.source"
    for _ in range(2):
        file.write_text("mine", encoding="utf-8")
        assert main(data) == 2 and file.read_text(encoding="utf-8") == "mine"
        assert main([*data, "--force"]) == 0
        assert load_run_file(file).train.steps == 30 and "mine" not in held_out.read_text(encoding="utf-8")
        held_out.write_text("mine", encoding="utf-8")


def test_runs_of_one_name_do_not_collide(data: list[str], tmp_path: Path) -> None:
    names = []
    for name in ("a.toml", "b.toml"):
        assert main([*data, "-o", name]) == 0
        names.append(load_run_file(tmp_path / name).train.run)
    (tmp_path / "runs" / "source-target-3").mkdir(parents=True)
    assert main([*data, "-o", "c.toml"]) == 0
    assert [*names, load_run_file(tmp_path / "c.toml").train.run] == [
        "runs/source-target", "runs/source-target-2", "runs/source-target-4",
    ]  # fmt: skip


def test_given_validation_is_used_and_nothing_is_held_out(
    data: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_pairs(tmp_path, "val", PAIRS[:7])
    assert (
        main([*data, "--valid-source", "val.source", "--valid-target", "val.target", "-o", "a.toml", "--run", "runs/x"])
        == 0
    )
    written = load_run_file(tmp_path / "a.toml")
    assert written.data.valid.model_dump() == {"source": "val.source", "target": "val.target"}
    assert written.train.run == "runs/x"
    assert "7 of your validation pairs have a text of the training data" in capfd.readouterr().err
    write_pairs(tmp_path, "val", PAIRS[:1])
    assert main([*data, "--valid-source", "val.source", "--valid-target", "val.target", "-o", "b.toml"]) == 0
    message = capfd.readouterr().err
    assert "1 of your validation pairs has a text" in message and "leave it out" in message
    assert "# 1 pair has a text that training reads too" in (tmp_path / "b.toml").read_text("utf-8")
    assert not list(tmp_path.glob("*-data"))


def test_every_key_is_explained(data: list[str], tmp_path: Path) -> None:
    main(data)
    text = (tmp_path / "run.toml").read_text(encoding="utf-8")
    assert text.count("#") > 15 and "[model]" in text


def test_what_it_writes_trains(data: list[str], tmp_path: Path) -> None:
    assert main(data) == 0
    overrides = ["train.steps=2", "model.width=16", "model.feedforward=8", "model.layers=1"]
    assert main(["train", "run.toml", *overrides]) == 0
    assert (tmp_path / "runs" / "source-target" / "checkpoints").is_dir()


@pytest.mark.parametrize(("name", "expected"), [("run.toml", "exists already"), ("run-data", "is not a folder")])
def test_nothing_is_overwritten(
    name: str, expected: str, data: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("mine", encoding="utf-8")
    assert main(data) == 2
    assert f"{name} {expected}" in capfd.readouterr().err
    assert (tmp_path / name).read_text(encoding="utf-8") == "mine"
    assert {entry.name for entry in tmp_path.iterdir()} == {"train.source", "train.target", name}


def test_a_killed_command_does_not_block_the_next_one(
    data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fit, seen = sys.modules["clearhead.apps.recipes.fit"].fit_run_file, []

    def note_files(*arguments: Any) -> object:
        seen.extend(path.name for path in (tmp_path / "run-data").iterdir())
        return fit(*arguments)

    monkeypatch.setattr("clearhead.apps.recipes.fit.fit_run_file", note_files)
    assert main(data) == 0
    parts = {f"{split}.{side}" for split in ("train", "valid") for side in ("source", "target")}
    assert set(seen) == {*parts, f"{UNFINISHED}{os.getpid()}"}
    assert {path.name for path in (tmp_path / "run-data").iterdir()} == parts
    # A kill leaves the mark, and no run file.
    (tmp_path / "run.toml").unlink()
    for pid, code in ((os.getpid(), 2), (2**22 + 1, 0)):
        (tmp_path / "run-data" / f"{UNFINISHED}{pid}").touch()
        (tmp_path / "run-data" / "old").touch()
        assert main(data) == code
        assert (tmp_path / "run-data" / "old").exists() == (code == 2)
        for mark in (tmp_path / "run-data").glob(f"{UNFINISHED}*"):
            mark.unlink()
    assert {path.name for path in (tmp_path / "run-data").iterdir()} == parts


def test_a_command_that_was_killed_at_its_mark_does_not_block_the_next_one(
    data: list[str], tmp_path: Path, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run-data").mkdir()
    (tmp_path / "run-data" / f".{UNFINISHED}7.writing-{2**22 + 1}").touch()
    fit, seen = sys.modules["clearhead.apps.recipes.fit"].fit_run_file, []

    def note_files(*arguments: Any) -> object:
        seen.extend(path.name for path in (tmp_path / "run-data").glob(".*"))
        return fit(*arguments)

    monkeypatch.setattr("clearhead.apps.recipes.fit.fit_run_file", note_files)
    assert main(data) == 0
    assert seen == [f"{UNFINISHED}{os.getpid()}"] and not [*(tmp_path / "run-data").glob(".*")]


def test_too_few_pairs(tmp_path: Path, data: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    write_pairs(tmp_path, "train", PAIRS[:19])
    assert main(data) == 2
    assert "at least 20" in capfd.readouterr().err


def test_one_validation_file_without_the_other(data: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*data, "--valid-source", "train.source"]) == 2
    assert "belong together" in capfd.readouterr().err
