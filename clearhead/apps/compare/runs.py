"""Read runs from their directories: run file, spec, metrics and the state of the newest checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel

from clearhead.base.errors import InputError
from clearhead.base.files import convert_json, refuse_absent
from clearhead.base.printing import Printed, num_parameters
from clearhead.checkpoints.reference import SPEC_FILE, ModelReference
from clearhead.checkpoints.runs.checkpoint import Tally, find_newest_undamaged, read_state
from clearhead.checkpoints.runs.directory import (
    RUN_FILE,
    flatten_keys,
    read_configuration,
    refuse_altered,
    retry_while_checkpoints_change,
)
from clearhead.checkpoints.runs.metrics import FILE_NAME, MetricsRow, read_metrics
from clearhead.core import build
from clearhead.spec import Model
from clearhead.spec.tasks.registry import find_task
from clearhead.spec.token_counts import TokenCounts

SCORE_NAME: Final = "score_name"
PLANNED_STEPS: Final = "planned_steps"

Quality = Literal["score", "loss"]


@dataclass(frozen=True, repr=False)
class ComparedRun(Printed):
    """Data of one training run, finished or not, that a comparison needs.

    Attributes:
        path: the run directory, as given.
        configuration: the run file with all defaults.
        spec: the spec of the model.
        metrics: the lines of the metrics file, at least one.
        state: the state of the newest undamaged checkpoint, without tensors. None means that there is no checkpoint.
    """

    path: Path
    configuration: Mapping[str, Any]
    spec: Model
    metrics: tuple[MetricsRow, ...]
    state: Mapping[str, Any] | None

    @property
    def task(self) -> str:
        """Kind of the run's task, such as "translate"."""
        return str(self.value_of("task.kind"))

    @property
    def seed(self) -> int:
        """The random seed."""
        return int(self.value_of("train.seed") or 0)

    @property
    def choices(self) -> Mapping[str, Any]:
        """Values that training chose at its start, such as the planned steps; empty without a checkpoint."""
        return self.state["choices"] if self.state is not None else {}

    @property
    def work(self) -> TokenCounts | None:
        """Token counts of all text that training has read, or None if the run did not record token counts."""
        sample = TokenCounts.from_choices(self.choices)
        return None if sample is None else sample.scale_to(self.metrics[-1].tokens)

    @property
    def tokens_per_second(self) -> float | None:
        """Training tokens per second over the whole run, without validations; None if unknown."""
        tokens, seconds, before = 0, 0.0, 0
        for row in self.metrics:
            if row.tokens_per_second > 0:
                tokens += row.tokens - before
                seconds += (row.tokens - before) / row.tokens_per_second
            before = row.tokens
        return tokens / seconds if seconds > 0 else None

    @property
    def score_name(self) -> str:
        """The name of the validation score."""
        return str(self.choices.get(SCORE_NAME) or find_task(self.task).score)

    @cached_property
    def parameters(self) -> Parameters:
        """The parameter counts of the model."""
        return count_parameters(self.spec)

    @property
    def unfinished(self) -> str | None:
        """The progress of an unfinished run as text, or None if the run is finished or its state is unknown."""
        if self.state is None:
            return None
        tally = Tally(**self.state.get("tally", {}))
        planned = int(self.choices.get(PLANNED_STEPS) or self.value_of("train.steps") or 0)
        seconds, patience = self.value_of("train.seconds"), self.value_of("train.early_stop.patience")
        ended = [
            planned > 0 and tally.step >= planned,
            seconds is not None and tally.seconds >= seconds,
            patience is not None and tally.misses >= patience,
        ]
        if any(ended) or not (planned or seconds or patience):
            return None
        step = self.metrics[-1].step
        return f"step {step:,} of {planned:,}" if planned else f"step {step:,}"

    def value_of(self, name: str) -> Any:
        """Return the value of a dotted run-file key, or None if it is not set."""
        return flatten_keys(self.configuration).get(name)

    def points(self, quality: Quality) -> list[tuple[MetricsRow, float]]:
        """Return the loss or score of every validation, each with its line of metrics."""
        values = ((row, row.valid_score if quality == "score" else row.valid_loss) for row in self.metrics)
        return [(row, value) for row, value in values if value is not None]

    def best(self, quality: Quality) -> float | None:
        """Return the highest score or the lowest loss of all validations, or None without validations."""
        values = [value for _, value in self.points(quality)]
        if not values:
            return None
        return max(values) if quality == "score" else min(values)


@dataclass(frozen=True, repr=False)
class Parameters(Printed):
    """Parameter counts of a model.

    Attributes:
        total: the number of all parameters, shared ones counted once.
        embeddings: the number of parameters in the tables of tokens, segments and positions.
    """

    total: int
    embeddings: int


def count_parameters(spec: Model) -> Parameters:
    """Count the parameters of a model from its spec, without allocating them."""
    module = build(spec, device="meta")
    table = re.compile(r"\.embedding\.(table|segments|position)\b")
    embeddings = (parameter.numel() for name, parameter in module.named_parameters() if table.search(name))
    return Parameters(num_parameters(module), sum(embeddings))


def read_run(path: Path) -> ComparedRun:
    """Read a run directory; the run may still be in training.

    Args:
        path: the run directory.

    Raises:
        InputError: the path is not a run directory, a file cannot be read, or there are no metrics yet.
    """
    reference = ModelReference.parse(str(path))
    if reference.label is not None and reference.folder.is_dir():
        raise InputError(f"{path} names one checkpoint, but a comparison needs whole runs: name {reference.folder}")
    refuse_absent(path, "run directory")
    missing = [name for name in (RUN_FILE, SPEC_FILE) if not (path / name).is_file()]
    if missing:
        raise InputError(
            f"{path} is not a run directory: it has no {' and no '.join(missing)}; name a folder that "
            "'clearhead train' wrote"
        )
    configuration = _configuration(path / RUN_FILE)
    refuse_altered(path)
    spec = Model.from_file(path / SPEC_FILE)
    metrics = tuple(read_metrics(path / FILE_NAME))
    if not metrics:
        raise InputError(f"{path} has no metrics yet: train for some steps first")
    return ComparedRun(
        path, configuration, spec, metrics, retry_while_checkpoints_change(path, lambda: _newest_state(path))
    )


def _configuration(file: Path) -> dict[str, Any]:
    tree = read_configuration(file)
    if not isinstance(tree.get("task"), dict) or not isinstance(tree.get("train"), dict):
        raise InputError(f"{file} has no [task] and [train]: restore the run file that 'clearhead train' wrote")
    # TOML allows dates and times, which a run file does not have.
    convert_json(json.loads(json.dumps(tree, default=str)), _Configuration, name=str(file))
    return tree


class _EarlyStop(BaseModel):
    patience: int | None = None


class _Train(BaseModel):
    seed: int | None = None
    steps: int | None = None
    epochs: float | None = None
    seconds: float | None = None
    early_stop: _EarlyStop | None = None


class _Task(BaseModel):
    kind: str
    init: str | None = None


class _Configuration(BaseModel):
    """The types of the run-file keys that a comparison uses."""

    task: _Task
    train: _Train


def _newest_state(run: Path) -> dict[str, Any] | None:
    folder, _ = find_newest_undamaged(run)
    return None if folder is None else read_state(folder)
