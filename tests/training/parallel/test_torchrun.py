"""The command under torchrun: a killed process ends the others with one sentence, and a restart goes on by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from clearhead import load
from clearhead.checkpoints.runs.checkpoint import checkpoint_steps
from clearhead.checkpoints.runs.metrics import read_metrics
from tests.training.parallel.group_job import free_ports
from tests.training.parallel.groups import TEXT, write_data, write_run_file

pytestmark = pytest.mark.slow
SENTENCE = "Another process of this training was killed"
STEPS = 100


def wait_for(happened: Callable[[], bool]) -> None:
    """Wait for minutes on a busy machine, but less than the half hour that processes wait for each other."""
    began = time.monotonic()
    while not happened():
        assert time.monotonic() - began < 600, "it did not happen"
        time.sleep(0.02)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the system knows no SIGKILL")
def test_a_killed_process_ends_the_others_and_a_restart_resumes(tmp_path: Path) -> None:
    write_data(tmp_path)
    file = write_run_file(tmp_path, "generate", 'kind = "generate"', "decoder", TEXT, "save_every = 5")
    run, log = tmp_path / "run", tmp_path / "stderr"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["-m", "clearhead", "train", str(file), f"train.run={run}", f"train.steps={STEPS}"]
    command += ["train.validate_every=1000", "--json"]
    with log.open("wb") as errors:
        job = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors)
    try:
        wait_for(lambda: max(checkpoint_steps(run), default=0) >= 10)
        (second,) = [worker for worker in psutil.Process(job.pid).children() if worker.environ().get("RANK") == "1"]
        second.kill()
        wait_for(lambda: SENTENCE in log.read_text(errors="replace"))
        out, _ = job.communicate(timeout=3000)
    finally:
        with contextlib.suppress(ProcessLookupError):
            job.terminate()
    text = log.read_text(errors="replace")
    assert job.returncode == 0, text
    assert text.count(SENTENCE) == 1 and text.count("continuing after step") == 1, text
    assert out.decode().count(f'"step": {STEPS}') == 1
    assert [row.step for row in read_metrics(run / "metrics.jsonl")] == [*range(10, STEPS + 1, 10)]
    assert load(str(run), device="cpu").generate("aa bb", max_new_tokens=3)[0].text


def run_two(folder: Path, words: list[list[str]], **variables: str) -> list[tuple[int, str]]:
    """Run the command in two processes that torchrun did not start; return exit code and messages of each."""
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", "clearhead", *arguments],
            cwd=folder,
            stderr=subprocess.PIPE,
            env=os.environ | {"RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | variables,
        )
        for rank, arguments in enumerate(words)
    ]
    try:
        errors = [job.communicate(timeout=600)[1].decode() for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [(job.returncode, text) for job, text in zip(jobs, errors, strict=True)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["run.toml"], "MASTER_PORT is not set"), (["run.toml", "--sweep", "train.seed=1..2"], "MASTER_PORT is not set")],
)
def test_a_fault_that_every_process_finds_is_said_once(tmp_path: Path, words: list[str], expected: str) -> None:
    (tmp_path / "run.toml").write_text("[task]\n")
    (code, messages), (other, silence) = run_two(tmp_path, [["train", *words]] * 2, MASTER_ADDR="127.0.0.1")
    assert (code, other) == (2, 2) and not silence
    assert expected in messages and messages.count("\n") == 1, messages


def test_a_fault_of_one_machine_ends_the_other_that_waits_for_it(tmp_path: Path) -> None:
    """The second machine lacks the file of its own parts, and says so; the first one ends with the same exit code."""
    write_data(tmp_path)
    file = write_run_file(tmp_path, "run", 'kind = "generate"', "decoder", TEXT)
    train = ["train", str(file)]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{next(free_ports())}"}
    (code, silence), (other, messages) = run_two(tmp_path, [train, ["--parts", "absent.py", *train]], **address)
    assert (code, other) == (2, 2) and "absent.py" in messages and "absent.py" not in silence, (silence, messages)
    assert not (tmp_path / "run").exists()
