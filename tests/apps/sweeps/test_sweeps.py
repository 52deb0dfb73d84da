"""A sweep from the outside: stopped, continued, with a run that fails, and compared; each run is as it is alone."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.checkpoints.weights.files import load_tensors
from tests.apps.cli.tiny_run import write_run_file

SWEEP = ["--sweep", "train.learning_rate=0.01,1e30"]


def interrupt_once(path: Path) -> None:
    """Send this process SIGINT once a path exists, as Ctrl-C does."""

    def wait() -> None:
        while not path.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.usefixtures("quick_trainings")
def test_a_sweep(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # "auto" times both precisions, so that a busy machine may choose another one for the run alone.
    train = 'steps = 60\nvalidate_every = 60\nsave_every = 5\nwarmup = 1\nprecision = "fp32"\n'
    file = write_run_file(tmp_path, train=train)
    folder = tmp_path / "run"
    good, bad = folder / "learning_rate=0.01", folder / "learning_rate=1e+30"
    interrupt_once(good / "checkpoints" / "step-5")
    assert main(["train", str(file), *SWEEP]) == 130
    assert "with 0 of 2 runs finished; everything is saved in" in capfd.readouterr().err
    assert good.exists() and not bad.exists()

    assert main(["train", str(file), *SWEEP]) == 2
    assert f"{folder} holds a sweep already: add --resume to continue it" in capfd.readouterr().err
    assert main(["train", str(file), "--resume", "--sweep", "train.learning_rate=0.01,0.1"]) == 2
    assert "holds another sweep" in capfd.readouterr().err

    assert main(["train", str(folder), "--json"]) == 1
    captured = capfd.readouterr()
    record = json.loads(captured.out.splitlines()[-1])
    assert "continuing after step" in captured.err
    assert "clearhead: not in the table, for they failed: learning_rate=1e+30; --resume tries them" in captured.err
    assert record["runs"] == [str(good)] and list(record["failed"]) == [bad.name]
    assert "loss became" in record["failed"][bad.name] or "gradient became" in record["failed"][bad.name]
    assert [row["name"] for row in record["rows"]] == [good.name] and Path(record["picture"]).is_file()

    alone = ch.train(file, {"train.learning_rate": 0.01, "train.run": str(tmp_path / "alone"), "train.save_every": 5})
    weights = "checkpoints/step-60/weights.safetensors"
    first, second = (load_tensors(run / weights) for run in (good, alone.run))
    assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)
