"""Run files for trainings in groups of processes, and the trainings themselves, all in one job."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clearhead.fast.native import load
from clearhead.training.assemble import train_run
from clearhead.training.runfile.read import load_run_file
from tests.training.quick import leave_out
from tests.training.small import Recorder

WORDS = [2 * letter for letter in "abcdefghijklmnopqrstuvw"]
RUN_FILE = """
[task]
{task}
[data]
train = {train}
valid = {valid}
max_length = 13
{model}
[train]
run = "{folder}/run"
steps = 4
batch_tokens = 331
learning_rate = {rate}
warmup = 2
clip = 1.0
validate_every = 2
device = "cpu"
precision = "fp32"
threads = 1
{more}
"""
MODEL = """
[tokenizer]
kind = "word"
[model]
family = "{family}"
layers = 2
width = 28
heads = 2
feedforward = 31
dropout = 0.0
"""
TEXT = '{ text = "PART.txt", document = "line" }'
PAIRS = '{ source = "PART.txt", target = "PART.other" }'


def write_data(folder: Path, seed: int = 3) -> None:
    """Lines of the alphabet, each from another letter on and of another length, and the same lines backwards."""
    draw = random.Random(seed)
    for part, count in (("train", 97), ("valid", 23)):
        lines = []
        for _ in range(count):
            start, length = draw.randrange(len(WORDS)), draw.randint(5, 11)
            lines.append([WORDS[(start + place) % len(WORDS)] for place in range(length)])
        (folder / f"{part}.txt").write_text("".join(f"{' '.join(line)}\n" for line in lines))
        (folder / f"{part}.other").write_text("".join(f"{' '.join(reversed(line))}\n" for line in lines))


def write_run_file(
    folder: Path, name: str, task: str, family: str, data: str, more: str = "", rate: float = 1e-2
) -> Path:
    """Write a run file whose data lie in the current folder; without a family it starts from a trained model."""
    path = folder / f"{name}.toml"
    path.write_text(
        RUN_FILE.format(
            task=task,
            train=data.replace("PART", "train"),
            valid=data.replace("PART", "valid"),
            model=MODEL.format(family=family) if family else "",
            folder=folder / name,
            more=more,
            rate=rate,
        )
    )
    return path


def train_alone(file: Path, *changes: str) -> Recorder:
    """Train in this very process, by the layers of PyTorch.

    Weights that are spread over processes have no others, and after four steps two tokens are so nearly as likely that
    another order of sums changes a translation.
    """
    shown = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "library", lambda _: None)
        leave_out(patch)
        train_run(load_run_file(file, list(changes)), resume=False, progress=shown)
    return shown


@dataclass
class Groups:
    """Trainings in groups of processes.

    Args:
        folder: where the data lie and the job writes.
    """

    folder: Path

    def run(self, trainings: list[dict[str, Any]]) -> None:
        """Run them one after the other, in one job."""
        (self.folder / "trainings.json").write_text(
            json.dumps([{"folder": str(self.folder), **training} for training in trainings])
        )
        command = [sys.executable, "-m", "tests.training.parallel.group_job", str(self.folder)]
        # Ended with all of its children, which a time limit on the command alone would leave behind.
        job = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
            env=os.environ | {"CXX": "no-compiler"},
        )  # fmt: skip
        try:
            _, said = job.communicate(timeout=1200)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            raise
        assert job.returncode == 0, said

    def found(self, name: str, rank: int = 0) -> dict[str, Any]:
        """What one process found in a training."""
        found: dict[str, Any] = json.loads((self.folder / f"{name}.{rank}.json").read_text())
        return found

    def result(self, name: str, rank: int = 0) -> dict[str, Any]:
        """What one process found in a training that succeeded."""
        found = self.found(name, rank)
        assert "error" not in found, found["trace"]
        return found
