"""Plan the check of a training job: its steps, its validations and checkpoints, and its forecast duration."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from clearhead.apps.train_process import TrainProcess
from clearhead.base.errors import InputError
from clearhead.base.printing import human_bytes
from clearhead.base.progress import message
from clearhead.checkpoints.runs.manifest import sha256_of
from clearhead.core.extensions.files import parts_options
from clearhead.training.assemble import AssembledRun, BuiltModel, assemble_run, forecast, open_training
from clearhead.training.data_files import describe_files
from clearhead.training.loop import Trainer
from clearhead.training.parallel.agreement import check_divisible
from clearhead.training.preflight import CHECKPOINT_SPEED, Preflight
from clearhead.training.progress.reports import TrainingProgress, duration
from clearhead.training.runfile.read import load_run_file
from clearhead.training.runfile.sections import RunFile

STEPS_SECONDS: Final = 10.0
"""Target duration of one run's steps, in seconds, if `--steps` is not set."""
LEAST_STEPS: Final = 8
MOST_STEPS: Final = 40
SAVES: Final = 4
"""Number of checkpoints of a checked run; the number of steps is a multiple of it."""
_PATIENCE: Final = 10**6


@contextlib.contextmanager
def assemble_job(run_file: RunFile) -> Iterator[AssembledRun]:
    """Context manager that assembles a job as `clearhead train` does.

    Raises:
        InputError: the data, the sizes or the run directory cannot be used.
    """
    with open_training(run_file, resume=False, progress=TrainingProgress()) as run:
        yield assemble_run(run)


@dataclass(frozen=True)
class CheckedJob:
    """The job under check.

    Attributes:
        file: the run file.
        folder: the temporary folder.
        steps: the last step that is trained.
        planned: number of steps of the whole job; None if the job ends only by time.
        validate_every, validate_every_before: steps between validations, in the check and by the run file.
        save_every: steps between checkpoints.
        overrides: changes to the run file, for every process.
        save_seconds, validation_seconds, seconds: forecasts of one save, one validation, and the whole check.
        limit: seconds after which a process counts as stuck.
        digests: SHA-256 digests by name: "run file" and "data".
        names: address of each weight, in the order of the optimizer.
        undivided_reason: explanation if a batch cannot be divided; empty if it can.
        one_process_reason: explanation if two processes cannot train; empty if they can.
    """

    file: Path
    folder: Path
    steps: int
    planned: int | None
    validate_every: int
    validate_every_before: int
    save_every: int
    overrides: Sequence[str]
    save_seconds: float
    validation_seconds: float
    seconds: float
    limit: float
    digests: Mapping[str, str]
    names: Sequence[str]
    undivided_reason: str
    one_process_reason: str

    def moments(self, moment: str) -> list[int]:
        """Return the steps at which the job saves or validates; `moment` is "saving" or "validation"."""
        validated = range(self.validate_every, self.steps + 1, self.validate_every)
        saved = {*range(self.save_every, self.steps + 1, self.save_every), *validated}
        return sorted(saved) if moment == "saving" else list(validated)

    def train(self, run: Path, changes: Sequence[str] = (), *, processes: int = 1) -> TrainProcess:
        """Start training the job in a run directory, with further changes to the run file."""
        words = [*parts_options(), str(self.file), f"train.run={run}", *self.overrides, *changes]
        return TrainProcess(words, run, processes=processes, limit=self.limit)

    def describe(self) -> str:
        """Describe the check in one sentence."""
        of = f"of {self.planned:,}" if self.planned is not None else "of the job"
        usual = self.validate_every_before
        instead = f" instead of {usual:,}" if usual != self.validate_every else ""
        return (
            f"{self.file}: the first {self.steps} steps {of}, with the learning rates of the whole job, validated "
            f"every {self.validate_every}{instead}, saved every {self.save_every}; about {duration(self.seconds)}"
        )


def examine(file: Path, folder: Path, *, steps: int | None, kills: int) -> CheckedJob:
    """Assemble a job, measure a few steps and undo their effect, and plan the check.

    Args:
        file: the run file.
        folder: the temporary folder.
        steps: number of steps to train; None means as many as take about `STEPS_SECONDS`.
        kills: number of kills.

    Raises:
        InputError: the job cannot be trained, or there is no room for its checkpoints.
    """
    run_file, began = load_run_file(file, [f"train.run={folder / 'forecast'}"]), time.monotonic()
    with assemble_job(run_file) as job:
        report = forecast(job)
        start_seconds = time.monotonic() - began + 3.0
        usual = job.trainer.settings.validate_every
        number, save_every = _steps(steps, report)
        validate_every = usual if usual <= number // 2 else max(1, number // 2)
        validations, saving = number // validate_every, report.checkpoint_bytes / CHECKPOINT_SPEED
        one_run = number * report.cost.step_seconds + validations * report.cost.validation_seconds + SAVES * saving
        seconds = (kills + 7) * start_seconds + 3 * one_run
        overrides = _overrides(run_file, job.model, save_every, seconds)
        if validate_every != usual:
            overrides.append(f"train.validate_every={validate_every}")
        if 2 * report.disk_bytes > report.disk_free:
            raise InputError(
                f"the check needs up to {human_bytes(2 * report.disk_bytes)} for checkpoints, but the disk of "
                f"{folder.parent} has {human_bytes(report.disk_free)} free: set TMPDIR to a folder on a larger one"
            )
        undivided_reason = _find_undivided_reason(job)
        return CheckedJob(
            file, folder, number, report.steps, validate_every, usual, save_every, overrides,
            save_seconds=saving, validation_seconds=report.cost.validation_seconds, seconds=seconds,
            limit=600 + 20 * (one_run + start_seconds),
            digests={"run file": sha256_of(file), "data": _digest_of_data(job)},
            names=_names(job.trainer), undivided_reason=undivided_reason,
            one_process_reason=undivided_reason or _find_one_process_reason(job, report),
        )  # fmt: skip


def _steps(requested_steps: int | None, report: Preflight) -> tuple[int, int]:
    """Return the number of steps to train, and the number of steps between checkpoints."""
    by_time = round(STEPS_SECONDS / max(1e-9, report.cost.step_seconds))
    wanted = requested_steps if requested_steps is not None else max(LEAST_STEPS, min(MOST_STEPS, by_time))
    save_every = -(-wanted // SAVES)
    if report.steps is not None:
        save_every = min(save_every, report.steps // SAVES)
    # A job with fewer steps is trained completely.
    number = SAVES * save_every or report.steps or SAVES
    if requested_steps is not None and number != requested_steps:
        message(f"{number} steps instead of {requested_steps}: a multiple of {SAVES}, and at most the steps of the job")
    return number, max(1, save_every)


def _overrides(run_file: RunFile, model: BuiltModel, save_every: int, seconds: float) -> list[str]:
    """Return the run-file changes for the check: they leave every training step the same, and fix measured choices."""
    train = run_file.train
    changes = [f"train.save_every={save_every}", f"train.keep={max(train.keep, SAVES + 2)}", "train.tracker=none"]
    if train.precision == "auto":
        changes.append(f"train.precision={model.precision}")
    if train.compile == "auto":
        changes.append(f"train.compile={'true' if model.compiles else 'false'}")
    if train.early_stop is not None:
        changes.append(f"train.early_stop.patience={_PATIENCE}")
    # A process must end by itself if the check was killed and could not end it.
    return [*changes, f"train.seconds={3600 + 20 * seconds:.1f}"]


def _find_undivided_reason(job: AssembledRun) -> str:
    """Return the reason why a batch cannot be divided between two processes, or an empty text."""
    try:
        check_divisible(job.data.parts, job.run.run_file.train.batch_tokens, 2)
    except InputError as error:
        return str(error)
    return ""


def _find_one_process_reason(job: AssembledRun, report: Preflight) -> str:
    """Return the reason why two processes cannot train on this machine, or an empty text."""
    device = job.run.device
    if device.type == "cuda":
        return "this machine has one GPU" if torch.cuda.device_count() < 2 else ""
    if device.type != "cpu":
        return f"several processes train on CPUs and CUDA devices, not on {device.type}"
    if 2 * report.memory_bytes > report.memory_free:
        needed, free = human_bytes(2 * report.memory_bytes), human_bytes(report.memory_free)
        return f"two processes need {needed} of memory, and {free} are free"
    return ""


def _digest_of_data(job: AssembledRun) -> str:
    parts = job.data.parts
    identity = [describe_files(job.run.run_file), parts.valid_data, parts.batches.state()]
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def _names(trainer: Trainer[Any]) -> list[str]:
    names = {id(parameter): name for name, parameter in trainer.module.named_parameters()}
    return [names[id(parameter)] for group in trainer.optimizer.param_groups for parameter in group["params"]]
