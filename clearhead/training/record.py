"""What a run writes into its directory: metrics, plots, checkpoints, and which of them is the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from clearhead.base.errors import InputError
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
from clearhead.checkpoints.runs.metrics import Metrics, MetricsLog
from clearhead.generate.scoring.result import Validation
from clearhead.training.parallel.engines import Engine
from clearhead.training.progress.plots import Plotter
from clearhead.training.settings import TrainSettings


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
        self, run: Path, settings: TrainSettings, engine: Engine[Any], *, num_snapshots: int, note: str
    ) -> None:
        self.run = run
        self._num_snapshots = num_snapshots
        self._settings = settings
        self._engine = engine
        self._log = MetricsLog(run)
        self._plotter = Plotter(run / "plots", note=note) if settings.plots else None
        self._rows: list[Metrics] = []

    def begin(self) -> None:
        """Remove what an attempt left that took no step."""
        files.clear_leftovers(self.run)
        self._log.cut_back(0)
        restore_recent(self.run, [])
        cut_back_snapshots(self.run, -1)
        files.remove_folder(self.run / "checkpoints" / files.AVERAGED)

    def newest(self) -> Path:
        """Return the folder of the newest undamaged checkpoint.

        Raises:
            InputError: there is none.
        """
        files.clear_leftovers(self.run)
        folder, skipped = files.newest_sound(self.run)
        if folder is None:
            raise InputError(f"{self.run} has no undamaged checkpoint to resume from. {' '.join(skipped)}".rstrip())
        for damage in skipped:
            message(f"{damage} It is skipped; the newest undamaged checkpoint is {folder.name}.")
        return folder

    def go_back(self, tally: files.Tally) -> None:
        """Make every file agree with the checkpoint that a run goes on from."""
        for number in self._log.damaged_lines():
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

    def write_line(self, row: Metrics) -> None:
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
        prune_recent(self.run, keep=(settings.average or 0) + settings.keep)
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
            with files.writing_folder(folder, otherwise=files.UNTOUCHED) as temporary:
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


class Unwritten(RunRecord):
    """The record of the other processes of a run, which write nothing of their own."""

    def begin(self) -> None:
        """Leave it to the first process."""

    def go_back(self, tally: files.Tally) -> None:
        """Leave it to the first process."""

    def write_line(self, row: Metrics) -> None:
        """Leave it to the first process."""

    def save(self, checkpoint: files.Checkpoint, tally: files.Tally) -> None:
        """Write this process's part of sharded weights."""
        self._engine.help_to_save([tensors for _, tensors in files.tensor_files(checkpoint)])

    def keep_snapshot(self, step: int, weights: Mapping[str, Tensor], saved_step: int) -> None:
        """Write this process's part of sharded weights."""
        if step != saved_step:
            self._engine.help_to_save([weights])

    def save_averaged(self, weights: Mapping[str, Tensor], steps: list[int], validation: Validation) -> None:
        """Leave it to the first process."""

    def draw(self) -> None:
        """Leave it to the first process."""
