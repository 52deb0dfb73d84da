"""Check a training job: it resumes exactly after kills, and updates on divided batches equal those on whole ones."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import psutil
import torch
from pydantic import BaseModel
from torch import Tensor, nn

from clearhead.apps.check.job.differences import RunDifference, find_differences, gradient_distance
from clearhead.apps.check.job.forecast import CheckedJob, assemble_job, examine
from clearhead.apps.train_process import TrainProcess
from clearhead.base.errors import RunFailure
from clearhead.base.files import convert_json, read_json_object
from clearhead.base.formats import FileFormat
from clearhead.base.progress import message
from clearhead.base.signals import Interrupted, StopRequested, StopSignals
from clearhead.checkpoints.runs.checkpoint import WEIGHTS, checkpoint_folder, checkpoint_steps, read_state
from clearhead.checkpoints.runs.manifest import sha256_of
from clearhead.checkpoints.runs.metrics import FILE_NAME, read_metrics
from clearhead.data.batches.base import Batches, Loss
from clearhead.generate.scoring.result import Validation
from clearhead.spec import Model
from clearhead.training.parallel.engines import BatchLoss, RankBatch, take_rank_rows
from clearhead.training.parallel.world import Process
from clearhead.training.runfile.model_table import with_dropout
from clearhead.training.runfile.read import load_run_file
from clearhead.training.runfile.sections import DROPOUTS, ModelSection
from clearhead.version import __version__

TOLERANCE: Final = 1e-4
"""Largest relative distance of gradients and losses in fp32 that counts as equal; sums may have another order."""


@dataclass(frozen=True)
class DivisionResult:
    """Comparison of one update on whole batches with the same update on divided batches.

    Attributes:
        distance: result of `gradient_distance`; None if the updates were not compared.
        where: the gradient or loss with the largest distance.
        reason: explanation if the updates were not compared or a run failed; empty otherwise.
        is_wrong: True if the updates differ or a run failed.
    """

    distance: float | None = None
    where: str = ""
    reason: str = ""
    is_wrong: bool = False

    def __str__(self) -> str:
        """Return whether the two updates agree and how far they are apart, or why they were not compared."""
        if self.distance is None:
            return self.reason if self.is_wrong else f"not checked: {self.reason}"
        verdict = "DIFFERENT" if self.is_wrong else "the same"
        return f"{verdict}: {self.distance:.1e} apart in {self.where}, {TOLERANCE:.0e} at most"


class _HalfBatches:
    """Iterator over the two halves of each batch of an endless iterator."""

    def __init__(self, whole: Batches[Any]) -> None:
        self._whole = whole
        self._waiting: list[RankBatch[Any]] = []

    @property
    def batches_per_epoch(self) -> int:
        """Number of whole batches in one pass over the data."""
        return self._whole.batches_per_epoch

    def __next__(self) -> RankBatch[Any]:
        if not self._waiting:
            batch = next(self._whole)
            self._waiting = [take_rank_rows(batch, Process(rank, 2)) for rank in range(2)]
        return self._waiting.pop(0)

    def state(self) -> dict[str, Any]:
        """Return the position in the data as JSON values."""
        return self._whole.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a position in the data."""
        self._whole.load_state(state)


def compare_divisions(job: CheckedJob) -> tuple[DivisionResult, DivisionResult]:
    """Compare one update on a whole batch with the update on its two halves, and with the update by two processes.

    Raises:
        InputError: the job cannot be trained in fp32.
        RunFailure: the training fails in one process.
    """
    if job.undivided_reason:
        return DivisionResult(reason=job.undivided_reason), DivisionResult(reason=job.undivided_reason)
    overrides = without_dropout(job)
    whole = _one_update(job, "whole", overrides, in_halves=False)
    halves = _distance(job, _one_update(job, "halves", overrides, in_halves=True), whole)
    if job.one_process_reason:
        return halves, DivisionResult(reason=job.one_process_reason)
    run = job.folder / "two-processes"
    try:
        with job.train(run, [*overrides, "train.save_every=1"], processes=2) as process:
            if not process.wait_until(lambda: process.has_saved(1)):
                return halves, DivisionResult(
                    reason=f"ended before the first update: {process.last_words()}", is_wrong=True
                )
    except RunFailure as error:
        return halves, DivisionResult(reason=str(error), is_wrong=True)
    return halves, _distance(job, run, whole)


def _distance(job: CheckedJob, run: Path, whole: Path) -> DivisionResult:
    distance, where = gradient_distance(run, whole, job.names)
    return DivisionResult(distance, where, is_wrong=not distance <= TOLERANCE)


def without_dropout(job: CheckedJob) -> list[str]:
    """Return the changes to the run file that switch dropout and compilation off and set fp32."""
    run_file = load_run_file(job.file)
    changes = ["train.precision=fp32", "train.compile=false"]
    if run_file.lora is not None:
        changes.append("lora.dropout=0.0")
    if run_file.model.spec is None:
        return [*changes, *(f"model.{key}=0.0" for key in DROPOUTS)]
    none = ModelSection(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
    file = job.folder / "spec.json"
    file.write_text(with_dropout(Model.from_file(Path(run_file.model.spec)), none).to_json(), encoding="utf-8")
    return [*changes, f"model.spec={file}"]


def _one_update(job: CheckedJob, name: str, overrides: list[str], *, in_halves: bool) -> Path:
    """Train the job for one update in this process, and return its run directory."""
    run = job.folder / name
    with assemble_job(load_run_file(job.file, [f"train.run={run}", *job.overrides, *overrides])) as parts:
        trainer = parts.trainer
        length = {"steps": 1, "epochs": None, "plots": False, "early_stop": None, "average": None, "best_by": "loss"}
        length["accumulate"] = trainer.settings.accumulate * (1 + in_halves)
        trainer = replace(
            trainer,
            settings=trainer.settings.model_copy(update=length),
            validate=lambda module: Validation(1.0, None),
            batches=_HalfBatches(trainer.batches) if in_halves else trainer.batches,
            loss=_loss_of_share(trainer.loss) if in_halves else trainer.loss,
        )
        try:
            trainer.run()
        except Interrupted as stopped:
            # The training handled the signal; the check needs it too.
            signal.raise_signal(stopped.signal)
            raise
    return run


def _loss_of_share(loss: Loss[Any]) -> Loss[Any]:
    def of_share(module: nn.Module, share: RankBatch[Any]) -> tuple[Tensor, int]:
        result: tuple[Tensor, int] = BatchLoss(module, loss)(share)
        return result

    return of_share


Moment = Literal["saving", "validation", "random"]
_WRITING: Final = re.compile(r"\.step-([0-9]+)\.writing-([0-9]+)-.*")
_VALIDATING: Final = re.compile(r"step ([0-9]+)  validating")
FORCED: Final[tuple[Moment, ...]] = ("validation", "saving")


@dataclass(frozen=True)
class Kill:
    """One SIGKILL that the check sent to a training process.

    Attributes:
        moment: moment of the kill: "saving", "validation" or "random".
        after: step of the newest checkpoint at that time; None if there was none.
    """

    moment: Moment
    after: int | None

    def __str__(self) -> str:
        """Return the moment of the kill in words."""
        when = {"saving": "while saving", "validation": "in a validation", "random": "at a random moment"}[self.moment]
        return f"{when} {'before the first checkpoint' if self.after is None else f'after step {self.after}'}"


@dataclass
class KilledRun:
    """A run that was killed and resumed until it reached the last step.

    Attributes:
        run: the run directory.
        kills: the kills, in order.
        failure: error if the run could not continue; empty otherwise.
    """

    run: Path
    kills: list[Kill] = field(default_factory=list)
    failure: str = ""


def train_undisturbed(job: CheckedJob) -> tuple[Path, float]:
    """Train the first steps of a job, and return the run directory and the seconds from the first step on.

    Raises:
        RunFailure: training failed.
    """
    run = job.folder / "undisturbed"
    with job.train(run) as process:
        process.wait_until(process.has_started)
        began = time.monotonic()
        _reach_the_end(job, process)
        return run, time.monotonic() - began


def train_with_kills(job: CheckedJob, kills: int, draw: random.Random, seconds: float) -> list[KilledRun]:
    """Train the same steps with kills; if a run ends before all kills came, another run gets the remaining kills.

    Args:
        job: the job to train.
        kills: number of kills; one is during saving, one during a validation, the rest at random moments.
        draw: random generator for the moments and their order.
        seconds: duration of the undisturbed run.
    """
    moments: list[Moment] = [FORCED[number] if number < len(FORCED) else "random" for number in range(kills)]
    draw.shuffle(moments)
    runs: list[KilledRun] = []
    # A short save can be missed, so the number of runs has a limit.
    while moments and len(runs) < kills + 3:
        runs.append(KilledRun(job.folder / f"killed-{len(runs) + 1}"))
        try:
            while moments and _kill_at_moment(job, runs[-1], moments, draw, seconds):
                moments.pop(0)
            with job.train(runs[-1].run) as process:
                _reach_the_end(job, process)
        except RunFailure as error:
            if not runs[-1].kills:
                raise
            runs[-1].failure = str(error)
            break
    return runs


def _reach_the_end(job: CheckedJob, process: TrainProcess) -> None:
    """Wait until the process has saved the last step.

    Raises:
        RunFailure: the training ended before the last step.
    """
    if not process.wait_until(lambda: process.has_saved(job.steps)):
        raise RunFailure(f"clearhead train ended before step {job.steps}: {process.last_words()}")


def _kill_at_moment(
    job: CheckedJob, killed: KilledRun, moments: Sequence[Moment], draw: random.Random, seconds: float
) -> bool:
    """Continue a run and kill it at the moment `moments[0]`; return False if it reached its last step before."""
    newest, moment = max(checkpoint_steps(killed.run), default=-1), moments[0]
    if newest >= job.steps:
        return False
    # Use only a share of the remaining time, so that later kills have room.
    rest = seconds * (1 - max(0, newest) / job.steps) * 2 / (len(moments) + 1)
    steps = [step for step in job.moments(moment) if step > newest]
    # If no step is left, choose one after the last: it is never reached.
    step = draw.choice(steps[: -(-len(steps) // len(moments))] or [job.steps + 1])
    pause = draw.random() * {"saving": job.save_seconds, "validation": job.validation_seconds, "random": rest}[moment]
    with job.train(killed.run) as process:

        def is_over() -> bool:
            return process.has_saved(job.steps)

        def is_inside() -> bool:
            match moment:
                case "saving":
                    return _is_saving(process, step)
                case "validation":
                    return _is_validating(process, step)
                case "random":
                    return process.has_started()

        while process.wait_until(lambda: is_inside() or is_over()) and not is_over():
            _wait(process, pause, is_over)
            if _kill_inside(process, lambda: is_inside() and not is_over()):
                newest = max(checkpoint_steps(killed.run), default=-1)
                killed.kills.append(Kill(moment, newest if newest >= 0 else None))
                message(f"killed {killed.kills[-1]}")
                return True
            # This moment has passed: kill at the beginning of the next one.
            pause = 0.0
    return False


def _wait(process: TrainProcess, seconds: float, is_over: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    process.wait_until(lambda: time.monotonic() > end or is_over())


def _kill_inside(process: TrainProcess, is_inside: Callable[[], bool]) -> bool:
    """Suspend the process; kill it if `is_inside()`, otherwise resume it. Return whether it was killed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.popen.suspend()
        if is_inside():
            process.kill()
            return True
        process.popen.resume()
    return False


def _is_saving(process: TrainProcess, step: int) -> bool:
    """Return whether the process is writing the checkpoint of `step` or of a later step."""
    with contextlib.suppress(OSError):
        writes = (_WRITING.fullmatch(path.name) for path in (process.run / "checkpoints").iterdir())
        # Files of a killed process remain until the new process has started.
        return any(write and int(write[1]) >= step and int(write[2]) == process.popen.pid for write in writes)
    return False


def _is_validating(process: TrainProcess, step: int) -> bool:
    """Return whether the process is in the validation of `step` or of a later step."""
    starts = filter(None, map(_VALIDATING.fullmatch, reversed(process.messages)))
    validated = next((int(start[1]) for start in starts), -1)
    return validated >= step and not any(row.step == validated for row in read_metrics(process.run / FILE_NAME)[-1:])


CERTIFICATE = FileFormat("a certificate", 1, "check the job again")
_MOST_SHOWN = 6


@dataclass(frozen=True)
class JobReport:
    """Result of checking a job.

    Attributes:
        job: the checked job.
        seed: seed of the moments of the kills.
        kills: the kills, in order.
        missed: number of planned kills that found no moment before the last step.
        faults: differences from the undisturbed run; empty if every bit is the same.
        halves: comparison of an update on two half batches with the update on the whole batch.
        processes: comparison of an update by two processes with the update by one.
        certificate: versions, machine and digests, by name.
    """

    job: CheckedJob
    seed: int
    kills: Sequence[Kill]
    missed: int
    faults: Sequence[str]
    halves: DivisionResult
    processes: DivisionResult
    certificate: Mapping[str, str]

    @property
    def is_right(self) -> bool:
        """True if nothing is wrong."""
        return not (self.faults or self.missed or self.halves.is_wrong or self.processes.is_wrong)

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        came = ", ".join(map(str, self.kills))
        if self.missed:
            came += f"; {self.missed} more could not be placed before step {self.job.steps}: check more steps"
        shown = [f"              {fault}" for fault in self.faults[:_MOST_SHOWN]]
        if len(self.faults) > _MOST_SHOWN:
            shown.append(f"              and {len(self.faults) - _MOST_SHOWN} more")
        verdict = "equal to the undisturbed run in every bit: weights, optimizer, losses, order of the data"
        if self.faults:
            verdict = "DIFFERENT from the undisturbed run, the first difference first"
        values = {
            "job": self.job.describe(),
            "killed": f"{len(self.kills)} times: {came} (--seed {self.seed})",
            "resumed": "\n".join([verdict, *shown]),
            "accumulated": f"halves of each batch against whole ones, in fp32 without dropout: {self.halves}",
            "two processes": f"against one, in fp32 without dropout: {self.processes}",
            **self.certificate,
        }
        return [line for name, value in values.items() for line in f"{name:<14}{value}".split("\n")]

    def record(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            **CERTIFICATE.header(),
            "ok": self.is_right,
            "run_file": str(self.job.file),
            "steps": self.job.steps,
            "planned_steps": self.job.planned,
            "validate_every": self.job.validate_every,
            "save_every": self.job.save_every,
            "seed": self.seed,
            "kills": [{"moment": kill.moment, "after_step": kill.after} for kill in self.kills],
            "missed_kills": self.missed,
            "faults": list(self.faults),
            "tolerance": TOLERANCE,
            "accumulated": _division_record(self.halves),
            "two_processes": _division_record(self.processes),
            "certificate": dict(self.certificate),
        }


def _division_record(division: DivisionResult) -> dict[str, Any]:
    return {
        "ok": not division.is_wrong,
        "distance": division.distance,
        "where": division.where or None,
        "reason": division.reason or None,
    }


def check_job(file: str | Path, *, steps: int | None = None, kills: int, seed: int | None = None) -> JobReport:
    """Train the first steps of a job undisturbed and with kills, and compare every bit; no files remain.

    Args:
        file: the run file.
        steps: number of steps, at least 1; None means as many steps as take some seconds.
        kills: number of kills, at least 1.
        seed: seed of the moments of the kills; None draws one.

    Raises:
        InputError: the run file, the data or the machine does not allow the training.
        RunFailure: the job fails undisturbed.
    """
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    report: JobReport | None = None
    with StopSignals() as signals:
        try:
            with signals.abandoning(), tempfile.TemporaryDirectory(prefix="clearhead-check-") as folder:
                report = _check(Path(file), Path(folder), steps, kills, seed)
        except StopRequested:
            pass
    if report is None:
        assert signals.received is not None, "only a signal ends a check without a report"
        # Raise the signal again, for the handlers that were active before the check.
        signal.raise_signal(signals.received)
        raise SystemExit(128 + signals.received)
    return report


def _check(file: Path, folder: Path, steps: int | None, kills: int, seed: int) -> JobReport:
    job = examine(file, folder, steps=steps, kills=kills)
    message(f"{job.describe()}; seed {seed}")
    halves, processes = compare_divisions(job)
    message("training undisturbed, then with kills and resumes")
    whole, seconds = train_undisturbed(job)
    runs = train_with_kills(job, kills, random.Random(seed), seconds)
    faults = [fault for run in runs for fault in find_faults(job, whole, run)]
    came = [kill for run in runs for kill in run.kills]
    missed = 0 if any(run.failure for run in runs) else kills - len(came)
    return JobReport(job, seed, came, missed, faults, halves, processes, _certificate(job, whole))


def read_certificate(file: Path) -> tuple[dict[str, Any], list[str]]:
    """Read a certificate file written by `record`, and compare its run file with the current one.

    Args:
        file: the certificate, a JSON file.

    Returns:
        A record, whose "ok" is True if the job was right and its run file has not changed; and lines of text.

    Raises:
        InputError: the file is no certificate, or has an unknown format version.
    """
    content = read_json_object(file, what="a certificate")
    CERTIFICATE.check(content, file)
    record = convert_json(content, _Record, name=str(file))
    run_file = Path(record.run_file)
    state = "no longer exists"
    if run_file.is_file():
        is_same = f"sha256 {sha256_of(run_file)}" == record.certificate.get("run file")
        state = "is the same" if is_same else "has changed since: check it again"
    verdict = "resumed exactly" if record.ok else "did NOT pass"
    lines = [f"{run_file}: the first {record.steps} steps {verdict}; the run file {state}"]
    lines += [f"{name:<14}{value}" for name, value in record.certificate.items()]
    return {"ok": record.ok and state == "is the same", "run_file": record.run_file, "state": state}, lines


class _Record(BaseModel):
    ok: bool
    run_file: str
    steps: int
    certificate: dict[str, str]


def find_faults(job: CheckedJob, whole: Path, killed: KilledRun) -> list[str]:
    """Return the faults of a killed run: it did not resume, or values differ from the undisturbed run."""
    if killed.failure:
        return [f"after the kill {killed.kills[-1]}, --resume: {killed.failure}"]
    run_differences: list[RunDifference] = find_differences(whole, killed.run, job.steps, job.names)
    first_kill = killed.kills[0].after if killed.kills else job.steps
    if run_differences and first_kill is not None and run_differences[0].step <= first_kill:
        reason = "so two runs differ even without a kill: something draws random numbers without the seed of the run"
        return [f"{run_differences[0]}; before the first kill, {reason}"]
    return [str(difference) for difference in run_differences]


def _certificate(job: CheckedJob, whole: Path) -> dict[str, str]:
    """Return versions, machine and digests for which the result holds."""
    checkpoint = checkpoint_folder(whole, job.steps)
    state = read_state(checkpoint)
    environment, choices = state["environment"], state["choices"]
    accelerator = "" if environment["accelerator"] == "none" else f", {environment['accelerator']}"
    processors = f"{os.cpu_count()} processors ({environment['processor features']}){accelerator}"
    return {
        "versions": f"clearhead {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "machine": (
            f"{platform.system()} {platform.machine()}, {processors}, {choices['threads']} threads, "
            f"{choices['precision']}"
        ),
        "run file": f"sha256 {job.digests['run file']}",
        "data": f"sha256 {job.digests['data']}",
        "weights": f"sha256 {sha256_of(checkpoint / WEIGHTS)} of step {job.steps}",
    }
