"""Run files for trainings in groups of processes, and the trainings themselves, all in one job."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clearhead.base.errors import RunFailure
from clearhead.core import Transformer
from clearhead.fast.native import load
from clearhead.generate.scoring.result import Validation
from clearhead.interpret.maps.hook_points import Captured, capture
from clearhead.training import assemble, loop
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
    """Write lines of the alphabet with random start and length, and the same lines backwards."""
    draw = random.Random(seed)
    for split, count in (("train", 97), ("valid", 23)):
        lines = []
        for _ in range(count):
            start, length = draw.randrange(len(WORDS)), draw.randint(5, 11)
            lines.append([WORDS[(start + offset) % len(WORDS)] for offset in range(length)])
        (folder / f"{split}.txt").write_text("".join(f"{' '.join(line)}\n" for line in lines))
        (folder / f"{split}.other").write_text("".join(f"{' '.join(reversed(line))}\n" for line in lines))


def write_run_file(
    folder: Path, name: str, task: str, family: str, data: str, more: str = "", rate: float = 1e-2
) -> Path:
    """Write a run file whose data are in the current folder; without a family it starts from a trained model."""
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


def watch_validations(patch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Capture activations of the training tree in each validation, from outside and from inside.

    Returns:
        The captured activations, and the answers of the plain tree when it is run afterwards.
    """
    seen: dict[str, list[Any]] = {"activations": [], "plain": []}
    plain_trees: list[Transformer] = []
    make_tree, measure = assemble.training_tree, loop._TrainingLoop._measure

    def tree_of(module: Transformer, *args: Any, **named: Any) -> Transformer:
        plain_trees.append(module)
        return make_tree(module, *args, **named)

    def keep(captured: Captured) -> None:
        for address, records in captured.items():
            assert records and all(type(record.tensor) is torch.Tensor for record in records), address
            tensors = [record.tensor for record in records]
            norms = [float(x[x.isfinite()].double().norm()) for x in tensors]  # a search bans ids in place
            seen["activations"].append([address, [[*x.shape, norm] for x, norm in zip(tensors, norms, strict=True)]])

    def measure_watched(training: loop._TrainingLoop[Any], *args: Any) -> Validation:
        parts, validate = training.trainer, training.trainer.validate

        def inside(tree: nn.Module) -> Validation:
            with capture(tree, ["encoder.layers.*.steps.0.branches.0.function.weights", "head"]) as captured:
                result = validate(tree)
            keep(captured)
            return result

        parts.validate = inside
        try:
            with capture(parts.module, ["decoder.layers.*.after", "logits"]) as captured:
                result = measure(training, *args)
        finally:
            parts.validate = validate
        keep(captured)
        plain, ids = plain_trees[-1], torch.ones(1, 3, dtype=torch.int64)
        for call in (lambda: plain(ids, ids), lambda: plain.encode(ids)):
            seen["plain"].append(answer_of(plain, call))
        return result

    patch.setattr(assemble, "training_tree", tree_of)
    patch.setattr(loop._TrainingLoop, "_measure", measure_watched)
    return seen


def answer_of(plain: Transformer, call: Callable[[], object]) -> str:
    """Return "" if a watched call runs, else the message of its failure."""
    with capture(plain, "encoder.final_norm") as captured:
        try:
            call()
        except RunFailure as refusal:
            assert not any(captured.values())
            return str(refusal)
    assert all(captured.values())
    return ""


def train_alone(file: Path, *changes: str) -> Recorder:
    """Train in this process, with the layers of PyTorch only.

    Sharded weights support no other layers. After four steps, two tokens are almost equally likely, so another order of
    sums would change a translation.
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
        folder: the folder of the data and of the results.
    """

    folder: Path

    def run(self, trainings: list[dict[str, Any]], environment: dict[str, str] | None = None) -> None:
        """Run the trainings one after the other, in one job; without `environment`, there is no compiler."""
        (self.folder / "trainings.json").write_text(
            json.dumps([{"folder": str(self.folder), **training} for training in trainings])
        )
        command = [sys.executable, "-m", "tests.training.parallel.group_job", str(self.folder)]
        # A time limit must end all children too, not only the command.
        job = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
            env=os.environ | (environment or {"CXX": "no-compiler"}),
        )  # fmt: skip
        try:
            _, errors = job.communicate(timeout=1200)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            raise
        assert job.returncode == 0, errors

    def read_record(self, name: str, rank: int = 0) -> dict[str, Any]:
        """Return the result of one process in a training."""
        record: dict[str, Any] = json.loads((self.folder / f"{name}.{rank}.json").read_text())
        return record

    def result(self, name: str, rank: int = 0) -> dict[str, Any]:
        """Return the result of one process in a training that succeeded."""
        record = self.read_record(name, rank)
        assert "error" not in record, record["trace"]
        return record
