"""Settings of a training run, and the result of one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, Literal

from torch import nn

from clearhead.base.printing import Printed
from clearhead.data.sources.run_file_tables import Count
from clearhead.generate.scoring.result import Validation
from clearhead.training.runfile.sections import Train

STARTUP_SECONDS: Final = 10.0
"""What training takes before its first step: libraries, data, the forecast."""
Metric = Literal["loss", "score"]


class TrainSettings(Train):
    """The [train] table of a run file, and what the task and the machine add to it.

    Args:
        precision: of the computation; "auto" has been resolved.
        validate_every: steps between two validations; a share has been resolved.
        log_every: steps between two lines of metrics.
        best_by: the metric that decides which checkpoint is best, unless `early_stop` names one.
        score_name: name of the validation score.
        plots: whether to plot the metrics into the run directory.
        choices: automatic choices to remember in every checkpoint (`checkpoint.saved_choices`).
    """

    precision: Literal["fp32", "bf16"] = "fp32"
    validate_every: Count = 500
    log_every: Count = 10
    best_by: Metric = "loss"
    score_name: str = "score"
    plots: bool = True
    choices: Mapping[str, str | int | float | bool] = {}

    @property
    def metric(self) -> Metric:
        """The metric that decides which checkpoint is best."""
        if self.early_stop is None:
            return self.best_by
        return "loss" if self.early_stop.metric == "loss" else "score"


@dataclass(frozen=True, repr=False)
class RunResult(Printed):
    """The result of a run: its directory, its best checkpoint and its end.

    Attributes:
        run: the run directory.
        step: optimizer steps taken.
        best: name of the best checkpoint, "step-N"; None if no step was validated.
        best_value: its validation loss or score.
        best_by: which of them, for the user: "validation loss" or the name of the score.
        seconds: wall-clock seconds over all resumptions.
        reason: why training ended, for the user.
        averaged: validation of the averaged weights; None if the run does not average.
    """

    run: Path
    step: int
    best: str | None
    best_value: float | None
    seconds: float
    reason: str
    best_by: str = "validation loss"
    averaged: Validation | None = None


def planned_steps(settings: Train, batches_per_epoch: int) -> int | None:
    """Return the last step by the number of steps or epochs; None if only time or early stopping ends the run."""
    ends = [settings.steps] if settings.steps is not None else []
    if settings.epochs is not None:
        ends.append(max(1, math.ceil(settings.epochs * batches_per_epoch / settings.accumulate)))
    return min(ends) if ends else None


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of the weights of a module, shared ones counted once."""
    return sum(tensor.nbytes for tensor in chain(module.parameters(), module.buffers()))


def num_snapshots(settings: Train, module: nn.Module) -> int:
    """Return how many snapshots a run keeps."""
    return min(settings.snapshots, settings.snapshot_megabytes * 10**6 // max(1, weight_bytes(module)))


def in_steps(count: int | float, steps: int | None, *, least: int = 1) -> int:
    """Return a number of steps that is given as such, or as a share of all steps.

    Args:
        count: steps, or a share below 1.
        steps: the last step of the run; None if it is not known, where a share has no meaning.
        least: the fewest steps that a share means.
    """
    if isinstance(count, int):
        return count
    assert steps is not None, "the rules of the run file refuse a share of unknown steps"
    # Not one step less for a share such as 0.57 that a float holds a little too low.
    return max(least, math.floor(count * steps + 1e-9))
