"""Makes run directories with the functions of the package, as training leaves them, without training."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from clearhead.base.formats import FORMAT_FILE
from clearhead.checkpoints.runs.checkpoint import Checkpoint, Tally, save_checkpoint, write_best
from clearhead.checkpoints.runs.directory import RUN_FORMAT
from clearhead.checkpoints.runs.metrics import MetricsLog, MetricsRow
from clearhead.spec import Model
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.token_counts import TokenCounts
from clearhead.training.random_state import environment
from clearhead.training.runfile.read import parse_run_file, to_toml

RUN_FILE = """\
[task]
kind = "translate"
[data]
train = { source = "train.de", target = "train.en" }
valid = { source = "valid.de", target = "valid.en" }
max_length = 31
[tokenizer]
kind = "word"
[model]
layers = 1
width = 14
heads = 2
feedforward = 22
[train]
run = "runs/a"
steps = 40
validate_every = 10
batch_tokens = 101
"""
WORK = TokenCounts(
    tokens=1000, first_tokens=600, first_pairs=7000, second_tokens=400, second_pairs=3000, memory_pairs=4500,
    outputs=400, sequences=50,
)  # fmt: skip
VOCABULARY = 37
TINY = Hyperparameters(layers=1, width=14, heads=2, feedforward=22)


@dataclass
class RunMaker:
    """The content of a run directory to write; every field may be changed.

    Attributes:
        overrides: changes to the run file, as on the command line of `clearhead train`.
        hparams: the model.
        validations: the validations as (step, loss, score).
        step_tokens: tokens of one step.
        step_seconds: seconds of one step.
        choices: values added to the choices in the checkpoint.
        batches: changes to the state of the batches in the checkpoint.
        tally: changes to the counters in the checkpoint.
        replaced: texts to replace in the written run file, for values that its rules would refuse.
    """

    overrides: Sequence[str] = ()
    hparams: Hyperparameters = TINY
    validations: Sequence[tuple[int, float, float | None]] = (
        (10, 3.0, 1.5),
        (20, 2.0, 7.5),
        (30, 2.5, 6.0),
        (40, 2.25, 7.0),
    )
    step_tokens: int = 100
    step_seconds: float = 0.5
    choices: Mapping[str, Any] = field(default_factory=dict)
    batches: Mapping[str, Any] = field(default_factory=dict)
    tally: Mapping[str, Any] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)

    def write(self, run: Path, *, seed: int = 1) -> Path:
        """Write the run directory and return it."""
        run.mkdir(parents=True)
        overrides = [f"train.run={run}", f"train.seed={seed}", *self.overrides]
        configuration = to_toml(parse_run_file(RUN_FILE, "run.toml", overrides))
        for before, after in self.replaced.items():
            assert before in configuration
            configuration = configuration.replace(before, after)
        (run / FORMAT_FILE).write_text(RUN_FORMAT.to_json(), encoding="utf-8")
        (run / "run.toml").write_text(configuration, encoding="utf-8")
        (run / "spec.json").write_text(self.spec().to_json(), encoding="utf-8")
        log = MetricsLog(run)
        for step, loss, score in self.validations:
            speed = self.step_tokens / self.step_seconds
            log.append(
                MetricsRow(step, step * self.step_tokens, step * self.step_seconds, 4.0, 1e-3, speed, loss, score)
            )
        self.checkpoint(run, seed)
        return run

    def spec(self) -> Model:
        return build_spec(self.hparams, source_vocab=VOCABULARY, target_vocab=VOCABULARY)

    def checkpoint(self, run: Path, seed: int) -> None:
        step = self.validations[-1][0]
        tally = Tally(step, step * self.step_tokens, step * self.step_seconds, best_step=step, validated_step=step)
        state = {
            "tally": {**vars(tally), **self.tally},
            "schedule": {},
            "batches": {"epoch": 1, "batch": 2, "seed": seed, "batch_tokens": 101, "data": "d1", **self.batches},
            "choices": {
                "tokenizer": "t1", "planned_steps": 40, "precision": "fp32", "threads": 1, **WORK.choices(),
                **self.choices,
            },
            "environment": environment(),
        }  # fmt: skip
        weights = {"weight": torch.zeros(2, 3)}
        save_checkpoint(run, Checkpoint(step, weights, {"state": {}, "param_groups": []}, None, state))
        write_best(run, step)


def learning(seed: int, *, start: float, end: float, pace: float, score: bool = True, every: int = 20) -> list[Any]:
    """Return validations that look like those of a real run."""
    noise = random.Random(f"{seed}/{end}")
    points = []
    for step in range(every, 2001, every):
        share = math.exp(-step / pace)
        loss = end + (start - end) * share + noise.gauss(0, 0.012)
        points.append((step, loss, 60 * math.exp(-loss / 2) + noise.gauss(0, 0.3) if score else None))
    return points
