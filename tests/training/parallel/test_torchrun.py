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
    run, said = tmp_path / "run", tmp_path / "stderr"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["-m", "clearhead", "train", str(file), f"train.run={run}", f"train.steps={STEPS}"]
    command += ["train.validate_every=1000", "--json"]
    with said.open("wb") as errors:
        job = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors)
    try:
        wait_for(lambda: max(checkpoint_steps(run), default=0) >= 10)
        (second,) = [one for one in psutil.Process(job.pid).children() if one.environ().get("RANK") == "1"]
        second.kill()
        wait_for(lambda: SENTENCE in said.read_text(errors="replace"))
        out, _ = job.communicate(timeout=3000)
    finally:
        with contextlib.suppress(ProcessLookupError):
            job.terminate()
    text = said.read_text(errors="replace")
    assert job.returncode == 0, text
    assert text.count(SENTENCE) == 1 and text.count("continuing after step") == 1, text
    assert out.decode().count(f'"step": {STEPS}') == 1
    assert [row.step for row in read_metrics(run / "metrics.jsonl")] == [*range(10, STEPS + 1, 10)]
    assert load(str(run), device="cpu").generate("aa bb", max_new_tokens=3)[0].text


def test_a_fault_that_every_process_finds_is_said_once(tmp_path: Path) -> None:
    """Before the libraries are loaded, so without torchrun: the processes know their places from the environment."""
    (tmp_path / "run.toml").write_text("[task]\n")
    command = [sys.executable, "-m", "clearhead", "train", "run.toml"]
    jobs = [
        subprocess.Popen(
            command, cwd=tmp_path, stderr=subprocess.PIPE, env=os.environ | {"LOCAL_RANK": rank, "RANK": rank}
        )
        for rank in ("0", "1")
    ]
    said = [job.communicate(timeout=300)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [2, 2]
    assert b"[task]" in said[0] and not said[1]
