"""What a training run is told, and what it gives back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from clearhead.errors import InputError
from clearhead.evaluate.result import Validation

Metric = Literal["loss", "score"]


@dataclass(frozen=True)
class EarlyStop:
    """End a run that no longer improves.

    Attributes:
        metric: which validation number counts; a loss should fall, a score should rise.
        patience: how many validations in a row may bring no improvement, at least 1.
    """

    metric: Metric
    patience: int


@dataclass(frozen=True)
class TrainSettings:
    """How long and how to train; of steps, epochs and seconds at least one is given, the first reached ends the run.

    Attributes:
        run: the run directory.
        steps: optimizer steps.
        epochs: passes over the training data.
        seconds: wall-clock seconds, over all resumptions.
        accumulate: batches whose gradients make one step.
        clip: largest norm of the gradient of the mean loss, or None for no limit.
        validate_every: steps between two validations; each is followed by a checkpoint.
        save_every: steps between further checkpoints, or None for none.
        keep: how many of the last checkpoints to keep, besides the best.
        average: how many of the last validated checkpoints to average at the end; 0 or 1 for none.
        ema: decay of the exponential average of the weights, which validation then measures, or None for none.
        early_stop: when to give up, or None for never.
        best_by: what decides which checkpoint is best; `early_stop`, where given, decides instead.
        seed: seeds torch, Python and numpy at the start of the run.
        precision: "bf16" computes in bfloat16 where autocast finds it safe; weights stay in float32.
        threads: threads of one operation on the CPU; None takes what torch has, or on resuming what the run began with.
        log_every: steps between two lines of metrics.
        score_name: what the validation score is called.
        plots: whether to draw pictures of the metrics into the run directory.
        choices: automatic choices made outside, remembered with every checkpoint (`checkpoint.saved_choices`).
    """

    run: Path
    steps: int | None = None
    epochs: float | None = None
    seconds: float | None = None
    accumulate: int = 1
    clip: float | None = 1.0
    validate_every: int = 500
    save_every: int | None = None
    keep: int = 3
    average: int = 0
    ema: float | None = None
    early_stop: EarlyStop | None = None
    best_by: Metric = "loss"
    seed: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    threads: int | None = None
    log_every: int = 10
    score_name: str = "score"
    plots: bool = True
    choices: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot work, all faults in one report."""
        faults = []
        if self.steps is None and self.epochs is None and self.seconds is None:
            faults.append("Training needs an end: give steps, epochs or seconds.")
        limits = {"steps": self.steps, "epochs": self.epochs, "seconds": self.seconds, "clip": self.clip}
        for name, limit in limits.items():
            if limit is not None and not limit > 0:
                faults.append(f"{name} must be positive, got {limit}.")
        counts = {"accumulate": self.accumulate, "validate_every": self.validate_every, "keep": self.keep,
                  "log_every": self.log_every, "save_every": self.save_every, "threads": self.threads}  # fmt: skip
        for name, count in counts.items():
            if count is not None and count < 1:
                faults.append(f"{name} must be at least 1, got {count}.")
        if self.average < 0:
            faults.append(f"average must not be negative, got {self.average}.")
        if self.ema is not None and not 0 < self.ema < 1:
            faults.append(f"ema is a decay between 0 and 1, got {self.ema}.")
        if self.early_stop is not None and self.early_stop.patience < 1:
            faults.append(f"The patience of early_stop must be at least 1, got {self.early_stop.patience}.")
        if faults:
            raise InputError.from_faults(faults, subject="the training settings")

    @property
    def metric(self) -> Metric:
        """What decides which checkpoint is best."""
        return self.early_stop.metric if self.early_stop is not None else self.best_by


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        run: the run directory.
        step: optimizer steps taken.
        best: name of the best checkpoint, "step-N", or None where none was validated.
        best_value: its validation loss or score.
        seconds: wall-clock seconds over all resumptions.
        reason: what ended the run, in words.
        averaged: what the averaged weights reached on validation, where the run averages.
    """

    run: Path
    step: int
    best: str | None
    best_value: float | None
    seconds: float
    reason: str
    averaged: Validation | None = None


def planned_steps(settings: TrainSettings, batches_per_epoch: int) -> int | None:
    """Return the step at which a run ends by its count of steps or epochs, or None where only time or patience ends it.

    Args:
        settings: how long to train.
        batches_per_epoch: batches in one pass over the training data.
    """
    ends = [settings.steps] if settings.steps is not None else []
    if settings.epochs is not None:
        ends.append(max(1, math.ceil(settings.epochs * batches_per_epoch / settings.accumulate)))
    return min(ends) if ends else None
