"""One update of a job, without dropout and in fp32: by whole batches, by halves accumulated, and by two processes."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from clearhead.apps.check.job.differences import gradient_distance
from clearhead.apps.check.job.forecast import Job, assembled
from clearhead.apps.check.job.processes import training
from clearhead.base.errors import RunFailure
from clearhead.base.signals import Interrupted
from clearhead.data.batches.base import Batches, Loss
from clearhead.generate.scoring.result import Validation
from clearhead.spec import Model
from clearhead.training.parallel.engines import BatchLoss, Share, share_of
from clearhead.training.parallel.processes import Process
from clearhead.training.runfile.model_table import with_dropout
from clearhead.training.runfile.read import load_run_file
from clearhead.training.runfile.sections import DROPOUTS, ModelSection

TOLERANCE: Final = 1e-4
"""How far gradients and losses in fp32 may be apart: sums in another order, and nothing else."""


@dataclass(frozen=True)
class Division:
    """An update that was computed in two ways.

    Attributes:
        distance: as of `gradient_distance`; None: it was not compared.
        where: whose gradient, or the loss, is so far apart.
        reason: why it was not compared, or what went wrong; empty: nothing.
        is_wrong: whether something went wrong.
    """

    distance: float | None = None
    where: str = ""
    reason: str = ""
    is_wrong: bool = False

    def __str__(self) -> str:
        """Return the result in words."""
        if self.distance is None:
            return self.reason if self.is_wrong else f"not checked: {self.reason}"
        verdict = "DIFFERENT" if self.is_wrong else "the same"
        return f"{verdict}: {self.distance:.1e} apart in {self.where}, {TOLERANCE:.0e} at most"


class _Halves:
    """The halves of endless batches, one after the other."""

    def __init__(self, whole: Batches[Any]) -> None:
        self._whole = whole
        self._waiting: list[Share[Any]] = []

    @property
    def batches_per_epoch(self) -> int:
        """Batches in one pass over the data, not halves."""
        return self._whole.batches_per_epoch

    def __next__(self) -> Share[Any]:
        if not self._waiting:
            batch = next(self._whole)
            self._waiting = [share_of(batch, Process(rank, 2)) for rank in range(2)]
        return self._waiting.pop(0)

    def state(self) -> dict[str, Any]:
        """Return the position in the data as JSON values."""
        return self._whole.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to a position in the data."""
        self._whole.load_state(state)


def compare_divisions(job: Job) -> tuple[Division, Division]:
    """Compare an update by whole batches with one by halves, and with one by two processes.

    Raises:
        InputError: the job cannot be trained in fp32.
        RunFailure: it fails in one process.
    """
    if job.undivided:
        return Division(reason=job.undivided), Division(reason=job.undivided)
    overrides = without_dropout(job)
    whole = _one_update(job, "whole", overrides, in_halves=False)
    halves = _distance(job, _one_update(job, "halves", overrides, in_halves=True), whole)
    if job.one_process:
        return halves, Division(reason=job.one_process)
    run = job.folder / "two-processes"
    try:
        steps = [*job.overrides, *overrides, "train.save_every=1"]
        with training(job.file, run, steps, limit=job.limit, processes=2) as process:
            if not process.until(lambda: process.has_saved(1)):
                return halves, Division(reason=f"ended before the first update: {process.last_words()}", is_wrong=True)
    except RunFailure as error:
        return halves, Division(reason=str(error), is_wrong=True)
    return halves, _distance(job, run, whole)


def _distance(job: Job, run: Path, whole: Path) -> Division:
    distance, where = gradient_distance(run, whole, job.names)
    return Division(distance, where, is_wrong=not distance <= TOLERANCE)


def without_dropout(job: Job) -> list[str]:
    """Return the changes to the run file that turn dropout off, and compute in fp32."""
    run_file = load_run_file(job.file)
    changes = ["train.precision=fp32"]
    if run_file.lora is not None:
        changes.append("lora.dropout=0.0")
    if run_file.model.spec is None:
        return [*changes, *(f"model.{key}=0.0" for key in DROPOUTS)]
    none = ModelSection(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
    file = job.folder / "spec.json"
    file.write_text(with_dropout(Model.from_file(Path(run_file.model.spec)), none).to_json(), encoding="utf-8")
    return [*changes, f"model.spec={file}"]


def _one_update(job: Job, name: str, overrides: list[str], *, in_halves: bool) -> Path:
    """Make one update of the job in this process, and return its run directory."""
    run = job.folder / name
    with assembled(load_run_file(job.file, [f"train.run={run}", *job.overrides, *overrides])) as parts:
        trainer = parts.trainer
        length = {"steps": 1, "epochs": None, "plots": False, "early_stop": None, "average": None, "best_by": "loss"}
        length["accumulate"] = trainer.settings.accumulate * (1 + in_halves)
        trainer = replace(
            trainer,
            settings=trainer.settings.model_copy(update=length),
            validate=lambda module: Validation(1.0, None),
            batches=_Halves(trainer.batches) if in_halves else trainer.batches,
            loss=_loss_of_share(trainer.loss) if in_halves else trainer.loss,
        )
        try:
            trainer.run()
        except Interrupted as stopped:
            # The training took the signal for itself.
            signal.raise_signal(stopped.signal)
            raise
    return run


def _loss_of_share(loss: Loss[Any]) -> Loss[Any]:
    def of_share(module: nn.Module, share: Share[Any]) -> tuple[Tensor, int]:
        found: tuple[Tensor, int] = BatchLoss(module, loss)(share)
        return found

    return of_share
