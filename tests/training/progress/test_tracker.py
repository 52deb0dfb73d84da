"""Trackers: numbers and no text leave a run, a resumed one has the same id, and one that fails ends no training."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import clearhead as ch
from clearhead.base.commands import make_install_command
from clearhead.base.errors import InputError
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.progress.tracker import TRACKER_FILE, TrackedProgress
from tests.training.progress.test_progress import plan, run_through
from tests.training.small import Recorder

SECRETS = [("geheimnis", "secret")] * 12


class Tracker:
    """The interface that wandb and trackio share; it keeps everything that it is given."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.options: list[dict[str, Any]] = []
        self.rows: list[tuple[dict[str, float], int]] = []
        self.finished, self.fails_at = 0, fails_at

    def init(self, **options: Any) -> Tracker:
        print("a line of the tracker")
        self.options.append(options)
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("the network is gone\nand more")
        self.rows.append((metrics, step))

    def finish(self) -> None:
        self.finished += 1


def train(run: Path, tracker: str, *, steps: int, resume: bool = False) -> None:
    tables = {
        "task": {"kind": "translate"},
        "data": {"valid": 0.3, "max_length": 24},
        "tokenizer": {"kind": "character"},
        "model": {"layers": 1, "width": 8, "heads": 2, "feedforward": 8},
        "train": {"run": str(run), "steps": steps, "validate_every": 2, "snapshots": 0, "tracker": tracker},
    }
    if not resume:
        ch.train(tables, data={"train": SECRETS})
        return
    ch.train(str(run / "run.toml"), overrides={"train.steps": steps}, resume=True)


@pytest.mark.usefixtures("quick_trainings")
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_run_is_tracked_and_goes_on_under_the_same_id_without_any_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, name, tracker)
    run = tmp_path / "runs" / "first"
    train(run, name, steps=2)
    train(run, name, steps=4, resume=True)
    assert capsys.readouterr().out == "", "stdout is for results"
    first, second = tracker.options
    run_id = json.loads((run / TRACKER_FILE).read_text())["id"]
    assert first["name"] == second["name"] == f"first-{run_id}" and second["resume"] == "allow"
    if name == "wandb":
        assert (first["id"], second["id"], first["mode"]) == (run_id, run_id, "offline")
        assert first["settings"]["console"] == "off" and "dir" not in first, "its links may not be in a run directory"
    assert [step for row, step in tracker.rows if "loss/train" in row] == [1, 2, 3, 4]
    assert [step for row, step in tracker.rows if "loss/valid" in row and "score/valid" in row] == [2, 4]
    assert tracker.finished == 2
    sent = repr((tracker.options, tracker.rows)).replace(str(run), "")
    assert "geheimnis" not in sent and "secret" not in sent and "jsonl" not in sent and str(tmp_path) not in sent
    assert first["config"]["model"]["width"] == 8 and first["config"]["task"] == "translate"


@pytest.mark.usefixtures("quick_trainings")
def test_a_tracker_that_fails_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", Tracker(fails_at=2))
    train(tmp_path / "run", "trackio", steps=4)
    errors = capsys.readouterr().err
    assert errors.count("trackio failed and is left out from here on, and the run goes on: the network is gone\n") == 1
    monkeypatch.setitem(sys.modules, "wandb", type(sys)("wandb"))
    train(tmp_path / "other", "wandb", steps=2)
    assert "wandb failed and is left out from here on" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["trackio", "wandb", "tensorboard"])
def test_a_missing_package_is_named_in_one_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    needs = f"needs the package {name}: install it with {make_install_command(extra=name)}, or leave"
    with pytest.raises(InputError, match=re.escape(needs)):
        train(tmp_path / "run", name, steps=2)
    assert not (tmp_path / "run").exists()


def test_tensorboard_reads_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    shown = Recorder()
    run_through(TrackedProgress("tensorboard", tmp_path, {}, shown, is_resumed=False))
    assert len(shown.steps) == 20 and len(shown.validations) == 1 and shown.ended == 1
    assert shown.messages == ["The disk is [nearly] full."] and shown.plans == [plan()]
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [event for event in LegacyEventFileLoader(str(file)).Load() if event.HasField("summary")]
    values = [(value.tag, value.simple_value, event.step) for event in events for value in event.summary.value]
    assert values[:2] == [("loss/train", 3.25, 1), ("learning_rate", pytest.approx(5e-3), 1)]
    assert values[-2:] == [("loss/valid", 2.5, 20), ("score/valid", 31.5, 20)]
    TrackedProgress("tensorboard", tmp_path, {}, TrainingProgress(), is_resumed=False).end()
