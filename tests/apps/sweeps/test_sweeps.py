"""A sweep from the outside: stopped, continued, with a failed run, and compared; each run equals one trained alone."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.apps.sweeps import api
from clearhead.apps.sweeps.api import SweepJob, job_environments, train_all
from clearhead.apps.train_process import TrainProcess
from clearhead.base.progress import Display, use_display
from clearhead.checkpoints.weights.files import load_tensors
from clearhead.training.runfile.read import load_run_file
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
    assert f"{folder} already holds a sweep: add --resume to continue it" in capfd.readouterr().err
    assert main(["train", str(file), "--resume", "--sweep", "train.learning_rate=0.01,0.1"]) == 2
    assert "holds another sweep" in capfd.readouterr().err

    assert main(["train", str(folder), "--json"]) == 1
    captured = capfd.readouterr()
    record = json.loads(captured.out.splitlines()[-1])
    assert "continuing after step" in captured.err
    assert "clearhead: runs failed and are not in the table: learning_rate=1e+30; --resume tries them" in captured.err
    assert record["runs"] == [str(good)] and list(record["failed"]) == [bad.name]
    assert "loss became" in record["failed"][bad.name] or "gradient became" in record["failed"][bad.name]
    assert [row["name"] for row in record["rows"]] == [good.name] and Path(record["picture"]).is_file()

    alone = ch.train(file, {"train.learning_rate": 0.01, "train.run": str(tmp_path / "alone"), "train.save_every": 5})
    weights = "checkpoints/step-60/weights.safetensors"
    first, second = (load_tensors(run / weights) for run in (good, alone.run))
    assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


class MessageList(Display):
    """A display that collects the messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of Python: it trains for a moment, then acts as its last argument demands."""
    program = tmp_path / "python"
    program.write_text(
        '#!/bin/sh\nfor word; do :; done\ntouch "$word.begun"\nmkdir -p "$word"\n'
        'touch "$word/metrics.jsonl"\nsleep 0.3\n'
        'case $word in *killed) kill -9 $$;; *failed) echo "clearhead: no" >&2; exit 1;; esac\ntouch "$word.ended"\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return tmp_path


def run_jobs(folder: Path, names: list[str], slots: int) -> tuple[dict[str, str], list[str], float]:
    jobs = [SweepJob(name, folder / name, [str(folder / name)]) for name in names]
    display, began = MessageList(), time.monotonic()
    with use_display(display):
        failed = train_all(jobs, folder, [{}] * slots, len(jobs))
    assert all((folder / f"{name}.begun").exists() for name in names)
    return failed, display.messages, time.monotonic() - began


def test_failed_runs_are_named_and_skipped(command: Path) -> None:
    failed, messages, _ = run_jobs(command, ["killed", "failed", "good"], slots=1)
    assert failed == {"killed": "the system killed it, probably because memory ran out", "failed": "no"}
    assert "failed failed and is skipped: no" in messages and "run 3 of 3: good" in messages
    assert (command / "good.ended").exists()


@pytest.mark.parametrize(("free", "together"), [(2**50, True), (0, False)])
def test_several_at_once_only_where_memory_allows(
    command: Path, free: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "free_memory", lambda: free)
    assert run_jobs(command, ["a", "b"], slots=2)[0] == {}
    began, ended = ((command / name).stat().st_mtime_ns for name in ("b.begun", "a.ended"))
    assert (began < ended) is together


def test_how_many_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    file = write_run_file(tmp_path)
    alone, threads = (
        load_run_file(file, ["train.device=cpu"]),
        load_run_file(file, ["train.threads=3", "train.device=cpu"]),
    )
    assert (len(job_environments([alone] * 5, "steps")), len(job_environments([threads] * 5, "tokens"))) == (1, 2)
    assert len(job_environments([threads] * 5, "seconds")) == 1, "whoever is measured by time has the machine alone"
    assert len(job_environments([threads, alone], "steps")) == 1
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus: Any = [load_run_file(file, [f"train.device={device}"]) for device in ("cuda", "cuda:1")]
    assert job_environments(gpus[:1], "steps") == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert job_environments(gpus[1:], "steps") == [{}]


def test_children_find_no_modules_in_the_working_directory(command: Path) -> None:
    """Run a sweep and a checked job in a folder with a random.py, which would break their imports."""
    program = Path(sys.executable)
    program.write_text('#!/bin/sh\necho "$PYTHONSAFEPATH" >> "$0.safe"\n')
    assert train_all([SweepJob("one", command / "one", [])], command, [{}], 1) == {}
    with TrainProcess([], command / "run", limit=60.0) as process:
        process.popen.wait()
    assert Path(f"{program}.safe").read_text() == "1\n1\n"
