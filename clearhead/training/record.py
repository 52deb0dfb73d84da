"""Record of a run: its settings, its files and its result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

from torch import Tensor, nn

from clearhead.base.errors import InputError
from clearhead.base.printing import Printed
from clearhead.base.progress import message
from clearhead.checkpoints.runs import checkpoint as files
from clearhead.checkpoints.runs.extra_weights import (
    cut_back_snapshots,
    keep_recent,
    prune_recent,
    prune_snapshots,
    restore_recent,
    save_averaged,
    snapshot_folder,
)
from clearhead.checkpoints.runs.metrics import MetricsLog, MetricsRow
from clearhead.data.sources.run_file_tables import Count
from clearhead.generate.scoring.result import Validation
from clearhead.training.parallel.engines import TrainingEngine
from clearhead.training.progress.plots import Plotter, training_loss_note
from clearhead.training.runfile.sections import Train

STARTUP_SECONDS: Final = 10.0
"""Rough time in seconds before the first step, for libraries, data and forecast."""
Metric = Literal["loss", "score"]


class TrainSettings(Train):
    """The [train] table of a run file with resolved values, and settings of the task.

    Args:
        precision: the precision of the computation; never "auto".
        compile: True if the training is compiled; never "auto".
        validate_every: the number of steps between two validations; never a share.
        log_every: the number of steps between two lines of metrics.
        best_by: the metric that decides which checkpoint is best, unless `early_stop` names one.
        score_name: the name of the validation score.
        plots: True if the metrics are plotted into the run directory.
        choices: the automatic choices that every checkpoint stores (`checkpoint.read_choices`).
    """

    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
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
        step: the number of optimizer steps taken.
        best: the name of the best checkpoint, "step-N". None means that no step was validated.
        best_value: the validation loss or score of the best checkpoint. None means that no step was validated.
        best_by: the name of the metric in `best_value`: "validation loss" or the name of the score.
        seconds: the wall-clock time over all resumptions, in seconds.
        reason: a phrase with the reason for the end of training.
        averaged: the validation of the averaged weights. None means that the run does not average.
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
    """Return the last step, from the number of steps or epochs; None if only time or early stopping ends the run."""
    ends = [settings.steps] if settings.steps is not None else []
    if settings.epochs is not None:
        ends.append(max(1, math.ceil(settings.epochs * batches_per_epoch / settings.accumulate)))
    return min(ends) if ends else None


def weight_bytes(module: nn.Module) -> int:
    """Return the size of the weights of a module in bytes; shared weights count once."""
    return sum(tensor.nbytes for tensor in chain(module.parameters(), module.buffers()))


def num_snapshots(settings: Train, module: nn.Module) -> int:
    """Return the number of snapshots that a run keeps."""
    return min(settings.snapshots, settings.snapshot_megabytes * 10**6 // max(1, weight_bytes(module)))


def in_steps(count: int | float, steps: int | None, *, least: int = 1) -> int:
    """Convert a share of all steps to a number of steps; a whole number is returned unchanged.

    Args:
        count: the number of steps (int), or a share of all steps below 1 (float).
        steps: the last step of the run. None means that it is not known; then `count` must be an int.
        least: the minimum result for a share.
    """
    if isinstance(count, int):
        return count
    assert steps is not None, "a share of all steps needs a known number of steps"
    # The small number corrects a share such as 0.57, whose float is slightly too low.
    return max(least, math.floor(count * steps + 1e-9))


class RunRecord:
    """Writes the files of a run in the first process: checkpoints, metrics, snapshots and plots.

    Args:
        run: the run directory.
        settings: the settings of the run.
        engine: the training engine, which writes the tensors of a checkpoint.
        num_snapshots: the number of snapshots to keep.
    """

    def __init__(self, run: Path, settings: TrainSettings, engine: TrainingEngine[Any], *, num_snapshots: int) -> None:
        self.run = run
        self._num_snapshots = num_snapshots
        self._settings = settings
        self._engine = engine
        self._log = MetricsLog(run)
        self._rows: list[MetricsRow] = []

    @cached_property
    def _plotter(self) -> Plotter | None:
        """The plotter of the metrics, made at the first line. None means that the run has no plots."""
        if not self._settings.plots:
            return None
        note = training_loss_note(self._engine.module, self._settings.label_smoothing)
        return Plotter(self.run / "plots", note=note)

    def begin(self) -> None:
        """Remove the files of an earlier start of this run that took no step."""
        files.clear_leftovers(self.run)
        self._log.cut_back(0)
        if self._settings.average:
            restore_recent(self.run, [])
        cut_back_snapshots(self.run, -1)
        files.remove_folder(self.run / "checkpoints" / files.AVERAGED)

    def newest(self) -> Path:
        """Return the folder of the newest undamaged checkpoint.

        Raises:
            InputError: there is no undamaged checkpoint.
        """
        files.clear_leftovers(self.run)
        folder, skipped = files.find_newest_undamaged(self.run)
        if folder is None:
            raise InputError(f"{self.run} has no undamaged checkpoint to resume from. {' '.join(skipped)}".rstrip())
        for damage in skipped:
            message(f"{damage} It is skipped; the newest undamaged checkpoint is {folder.name}.")
        return folder

    def go_back(self, tally: files.Tally) -> None:
        """Set the files of the run back to the resumed checkpoint: metrics, recent weights, snapshots and `best`."""
        for number in self._log.find_damaged_lines():
            message(f"{self._log.path}: line {number} is damaged and is left out")
        self._log.cut_back(tally.logged_step)
        self._rows = self._log.rows()
        for lost in restore_recent(self.run, tally.recent):
            message(lost)
        cut_back_snapshots(self.run, tally.step)
        self._restore_best(tally)
        self._prune(tally)

    def _restore_best(self, tally: files.Tally) -> None:
        """Make the file `best` name the best checkpoint so far; if that one is damaged, the resumed checkpoint."""
        best = tally.best_step
        if best is None:
            (self.run / "best").unlink(missing_ok=True)
            return
        damage = files.weights_damage(files.checkpoint_folder(self.run, best))
        if damage is not None:
            message(f"{damage} It was the best; step-{tally.step} takes its place.")
            best = tally.step
        if files.read_best(self.run) != best:
            files.write_best(self.run, best)

    def write_line(self, row: MetricsRow) -> None:
        """Write a line of metrics; if the step already has a line, only its validation is added."""
        if self._rows and self._rows[-1].step == row.step:
            # A signal arrived between the line of this step and its validation.
            self._log.cut_back(row.step - 1)
            row = replace(self._rows.pop(), valid_loss=row.valid_loss, valid_score=row.valid_score)
        self._log.append(row)
        self._rows.append(row)
        if self._plotter is not None:
            self._plotter.draw_if_due(self._rows, score_name=self._settings.score_name)

    def save(self, checkpoint: files.Checkpoint, tally: files.Tally) -> None:
        """Write a checkpoint, mark the best one, and delete old ones.

        Raises:
            RunFailure: the disk is full or refuses the write.
        """
        self._log.sync()
        files.save_checkpoint(self.run, checkpoint, save=self._engine.save)
        if tally.best_step is not None and files.read_best(self.run) != tally.best_step:
            files.write_best(self.run, tally.best_step)
        if tally.recent and tally.recent[-1] == tally.step:
            keep_recent(self.run, tally.step)
        self._prune(tally, checkpoint.state["tally"]["best_step"])

    def _prune(self, tally: files.Tally, resumed_best: int | None = None) -> None:
        """Delete old checkpoints and snapshots, and weights for the average that no remaining checkpoint needs."""
        settings = self._settings
        files.prune_checkpoints(
            self.run,
            newest=tally.step,
            keep=settings.keep,
            best=tally.best_step,
            resumed_best=resumed_best,
        )
        if settings.average:
            prune_recent(self.run, keep=settings.average + settings.keep)
        prune_snapshots(self.run, newest=tally.step, keep=self._num_snapshots)

    def keep_snapshot(self, step: int, weights: Mapping[str, Tensor], saved_step: int) -> None:
        """Write the weights of a step as a snapshot, and delete the snapshots that it replaces.

        Args:
            step: the step of the weights.
            weights: the weights, in the form that validations use.
            saved_step: the step of the last checkpoint; if it is the same step, its file is linked.

        Raises:
            RunFailure: the disk is full or refuses the write.
        """
        folder = snapshot_folder(self.run, step)
        if step == saved_step:
            files.link_weights(self.run, step, folder)
        else:
            with files.write_folder(folder, otherwise=files.UNTOUCHED) as temporary:
                self._engine.save(temporary / files.WEIGHTS, weights)
        prune_snapshots(self.run, newest=saved_step, keep=self._num_snapshots)

    def save_averaged(self, weights: Mapping[str, Tensor], steps: list[int], validation: Validation) -> None:
        """Write the averaged weights.

        Args:
            weights: the averaged weights.
            steps: the steps that were averaged.
            validation: the validation of the averaged weights.
        """
        facts = {"steps": steps, "valid_loss": validation.loss, "valid_score": validation.score}
        save_averaged(self.run, weights, facts)

    def draw(self) -> None:
        """Draw all plots."""
        if self._plotter is not None:
            self._plotter.draw(self._rows, score_name=self._settings.score_name)


class FollowerRecord(RunRecord):
    """The run record in every process except the first: writes no files except shards of tensors."""

    def begin(self) -> None:
        """Do nothing: the first process removes old files."""

    def go_back(self, tally: files.Tally) -> None:
        """Do nothing: the first process restores the files."""

    def write_line(self, row: MetricsRow) -> None:
        """Do nothing: the first process writes the metrics."""

    def save(self, checkpoint: files.Checkpoint, tally: files.Tally) -> None:
        """Write the shards of this process, if the weights are sharded."""
        self._engine.join_save([tensors for _, tensors in files.tensor_files(checkpoint)])

    def keep_snapshot(self, step: int, weights: Mapping[str, Tensor], saved_step: int) -> None:
        """Write the shards of this process, if the weights are sharded."""
        if step != saved_step:
            self._engine.join_save([weights])

    def save_averaged(self, weights: Mapping[str, Tensor], steps: list[int], validation: Validation) -> None:
        """Do nothing: the first process writes the averaged weights."""

    def draw(self) -> None:
        """Do nothing: the first process draws the plots."""
