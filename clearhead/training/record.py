"""Settings, files and result of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from clearhead.training.progress.plots import Plotter
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


class RunRecord:
    """The files of a run, as the process that owns its directory writes them.

    Args:
        run: the run directory.
        settings: of the run.
        engine: writes the tensors of a checkpoint.
        num_snapshots: how many are kept.
        note: about the training loss, for its plot.
    """

    def __init__(
        self, run: Path, settings: TrainSettings, engine: TrainingEngine[Any], *, num_snapshots: int, note: str
    ) -> None:
        self.run = run
        self._num_snapshots = num_snapshots
        self._settings = settings
        self._engine = engine
        self._log = MetricsLog(run)
        self._plotter = Plotter(run / "plots", note=note) if settings.plots else None
        self._rows: list[MetricsRow] = []

    def begin(self) -> None:
        """Remove what an attempt left that took no step."""
        files.clear_leftovers(self.run)
        self._log.cut_back(0)
        if self._settings.average:
            restore_recent(self.run, [])
        cut_back_snapshots(self.run, -1)
        files.remove_folder(self.run / "checkpoints" / files.AVERAGED)

    def newest(self) -> Path:
        """Return the folder of the newest undamaged checkpoint.

        Raises:
            InputError: there is none.
        """
        files.clear_leftovers(self.run)
        folder, skipped = files.find_newest_undamaged(self.run)
        if folder is None:
            raise InputError(f"{self.run} has no undamaged checkpoint to resume from. {' '.join(skipped)}".rstrip())
        for damage in skipped:
            message(f"{damage} It is skipped; the newest undamaged checkpoint is {folder.name}.")
        return folder

    def go_back(self, tally: files.Tally) -> None:
        """Make every file agree with the checkpoint that a run goes on from."""
        for number in self._log.find_damaged_lines():
            message(f"{self._log.path}: line {number} is damaged and is left out.")
        self._log.cut_back(tally.logged_step)
        self._rows = self._log.rows()
        for lost in restore_recent(self.run, tally.recent):
            message(lost)
        cut_back_snapshots(self.run, tally.step)
        self._restore_best(tally)
        self._prune(tally)

    def _restore_best(self, tally: files.Tally) -> None:
        """Make the file `best` agree with the checkpoint: a later best checkpoint may be damaged."""
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
        """Write a line of metrics; of a step that has a line already, only the validation is new."""
        if self._rows and self._rows[-1].step == row.step:
            # A signal came between this step's line and its validation.
            self._log.cut_back(row.step - 1)
            row = replace(self._rows.pop(), valid_loss=row.valid_loss, valid_score=row.valid_score)
        self._log.append(row)
        self._rows.append(row)
        if self._plotter is not None:
            self._plotter.draw_if_due(self._rows, score_name=self._settings.score_name)

    def save(self, checkpoint: files.Checkpoint, tally: files.Tally) -> None:
        """Write a checkpoint, mark the best one and delete those that are not kept.

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
        """Delete old checkpoints and snapshots, and recent weights that no kept checkpoint needs."""
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
        """Write the weights of a step by themselves, and delete the snapshots that they replace.

        Args:
            step: of the weights.
            weights: those that a validation measures.
            saved_step: that of the last checkpoint, which shares its file where the step is the same.

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
        """Write averaged weights.

        Args:
            weights: their mean.
            steps: those it is the mean of.
            validation: their validation.
        """
        facts = {"steps": steps, "valid_loss": validation.loss, "valid_score": validation.score}
        save_averaged(self.run, weights, facts)

    def draw(self) -> None:
        """Draw the plots."""
        if self._plotter is not None:
            self._plotter.draw(self._rows, score_name=self._settings.score_name)


class FollowerRecord(RunRecord):
    """The record of the other processes of a run, which write nothing of their own."""

    def begin(self) -> None:
        """Leave it to the first process."""

    def go_back(self, tally: files.Tally) -> None:
        """Leave it to the first process."""

    def write_line(self, row: MetricsRow) -> None:
        """Leave it to the first process."""

    def save(self, checkpoint: files.Checkpoint, tally: files.Tally) -> None:
        """Write this process's part of sharded weights."""
        self._engine.join_save([tensors for _, tensors in files.tensor_files(checkpoint)])

    def keep_snapshot(self, step: int, weights: Mapping[str, Tensor], saved_step: int) -> None:
        """Write this process's part of sharded weights."""
        if step != saved_step:
            self._engine.join_save([weights])

    def save_averaged(self, weights: Mapping[str, Tensor], steps: list[int], validation: Validation) -> None:
        """Leave it to the first process."""

    def draw(self) -> None:
        """Leave it to the first process."""
