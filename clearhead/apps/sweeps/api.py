"""Run sweeps: check all runs first, train them in child processes, and compare the results."""

from __future__ import annotations

import contextlib
import os
import time
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any, Final

import psutil
import torch

from clearhead.apps.compare.report import RunComparison, compare_runs
from clearhead.apps.compare.runs import read_run
from clearhead.apps.sweeps.budgets import PlannedRun, budget_of, check_budget
from clearhead.apps.sweeps.variations import BASE_FILE, SWEEP_FILE, Equal, Variation, run_names
from clearhead.apps.train_process import TrainProcess
from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError, RunFailure
from clearhead.base.files import read_text_file, refuse_unwritable_place
from clearhead.base.machine import choose_device, free_memory
from clearhead.base.printing import Printed
from clearhead.base.progress import message
from clearhead.base.signals import Interrupted, StopSignals
from clearhead.checkpoints.runs.directory import RunDirectory, acquire_lock, differing_keys, read_configuration
from clearhead.core.extensions.files import parts_options
from clearhead.training.parallel.world import Process
from clearhead.training.runfile.read import extensions_folder, parse_run_file, parse_tables, toml_text, toml_value
from clearhead.training.runfile.sections import RunFile

PICTURE: Final = "compare.png"


@dataclass(frozen=True, repr=False)
class SweepResult(Printed):
    """The result of a sweep; as a string it is the table of its runs.

    Attributes:
        folder: the directory of the sweep.
        runs: the directories of the finished runs.
        failed: the reason of each failure, by the name of the run.
        comparison: the comparison of the finished runs.
        picture: the path of the learning curves. None means that no run was validated.
    """

    folder: Path
    runs: tuple[Path, ...]
    failed: Mapping[str, str]
    comparison: RunComparison
    picture: Path | None

    def __str__(self) -> str:
        return str(self.comparison)

    def record(self) -> dict[str, Any]:
        """Return the sweep as JSON values."""
        picture = None if self.picture is None else str(self.picture)
        runs = [str(run) for run in self.runs]
        return {"sweep": str(self.folder), "runs": runs, "failed": dict(self.failed), "picture": picture} | (
            self.comparison.record()
        )


@check_types
def sweep(
    run_file: str | Path | Mapping[str, Any],
    vary: Mapping[str, Any] | Sequence[Any],
    *,
    equal: Equal = "steps",
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> SweepResult:
    """Train one run for each of several changes to a run file at an equal budget, and compare the runs.

    Args:
        run_file: the path of a run file, or its tables. The directory of the sweep is its train.run; each run has a
            directory inside.
        vary: a mapping of dotted keys to values, combined in every way; or a list with the keys and values of each run.
        equal: the budget that is equal for all runs: steps, tokens (steps are adapted), seconds, or parameters (widths
            are adapted, steps are equal).
        overrides: a mapping of dotted keys to values, applied to all runs.
        resume: True to continue a sweep: finished runs stay, others continue or start.

    Returns:
        The finished runs, their comparison and their picture.

    Raises:
        InputError: the sweep, a run file or the data cannot be used; no run was trained.
        RunFailure: every run failed.
    """
    if isinstance(run_file, Mapping):
        text, name, folder = toml_text(run_file), "the run file", extensions_folder(Path("run.toml"))
    else:
        text, name, folder = (
            read_text_file(Path(run_file), "run file"),
            str(run_file),
            extensions_folder(Path(run_file)),
        )
    words = [f"{key}={toml_value(value)}" for key, value in (overrides or {}).items()]
    if isinstance(vary, Mapping):
        return run_sweep(text, name, words, Variation(vary), equal, resume=resume, folder=folder)
    if not all(isinstance(run, Mapping) for run in vary):
        raise InputError("`vary` must be a mapping of keys to values, or a list with one such mapping per run")
    return run_sweep(text, name, words, Variation({}, vary), equal, resume=resume, folder=folder)


def run_sweep(
    text: str, name: str, words: Sequence[str], variation: Variation, equal: Equal, *, resume: bool, folder: Path | None
) -> SweepResult:
    """Train and compare the runs of a sweep.

    Args:
        text, name: the text of the run file, and its name in messages.
        words: changes for all runs, as texts `table.key=value`.
        variation: the varied keys and values.
        equal: the budget that is equal for all runs.
        resume: True to continue a sweep.
        folder: the folder to which the paths of custom modules are relative. None means that none are imported.

    Raises:
        InputError: the sweep, a run file or the data cannot be used; no run was trained.
        RunFailure: every run failed.
    """
    process = Process.here()
    # Refuse even a single process under torchrun: the runs would join its job.
    if process.size > 1 or process.has_agent:
        raise InputError("a sweep starts the processes of its runs: call it without torchrun")
    runs = plan_runs(text, name, words, variation, folder)
    check_budget(variation.keys, runs, equal)
    tables = parse_tables(text, name, words)
    # The runs get the files of custom modules imported here: the directory of a sweep names no code.
    tables.get("model", {}).pop("parts", None)
    base, sweep_file, folder = toml_text(tables), variation.to_toml(equal), Path(str(tables["train"]["run"]))
    _refuse_other(folder, base, sweep_file, resume=resume)
    changes = budget_of(variation.keys, runs, equal)
    for run, texts in zip(runs, changes, strict=True):
        run.reread(texts)
    folder.mkdir(parents=True, exist_ok=True)
    with RunDirectory(folder, acquire_lock(folder), is_new=False) as directory:
        directory.write_text(BASE_FILE, base)
        directory.write_text(SWEEP_FILE, sweep_file)
        words_before = [*parts_options(), str(folder / BASE_FILE)]
        names = run_names([run.varied for run in runs])
        jobs = [
            SweepJob(
                each, folder / each, [*words_before, *_assignments(_with_run_directory(run, folder / each)), *texts]
            )
            for each, run, texts in zip(names, runs, changes, strict=True)
        ]
        waiting = [job for job in jobs if not _is_finished(job.run)]
        if len(waiting) < len(jobs):
            message(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are already finished")
        slots = job_environments([run.run_file for run in runs], equal)
        failed = train_all(waiting, folder, slots[: len(waiting)], len(jobs))
        return _compare_finished(folder, jobs, failed, equal, shared_machine=min(len(slots), len(jobs)) > 1)


def plan_runs(
    text: str, name: str, words: Sequence[str], variation: Variation, folder: Path | None = Path()
) -> list[PlannedRun]:
    """Parse the run file once for each run of a sweep, with the changes of this run.

    Args:
        text, name, words, folder: the run file and the changes for all runs; see `run_sweep`.
        variation: the varied keys and values.

    Raises:
        InputError: the first fault of the sweep, of the run file, or of the run file with the changes of a run.
    """
    varied = variation.configurations()
    parse_run_file(text, name, words, folder=folder)
    twice = [key for key in variation.keys if any(word.partition("=")[0].strip() == key for word in words)]
    if twice:
        raise InputError(f"{twice[0]} is both swept and set for all runs: leave out one of them")
    runs = []
    for configuration in varied:

        def reread(changes: Sequence[str], configuration: Mapping[str, Any] = configuration) -> Any:
            return parse_run_file(text, name, [*words, *_assignments(configuration), *changes], folder=folder)

        runs.append(PlannedRun(configuration, reread([]), reread))
    return runs


def _assignments(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={toml_value(value)}" for key, value in values.items()]


def _with_run_directory(run: PlannedRun, path: Path) -> Mapping[str, Any]:
    """Return the varied run-file keys and values of one run, plus its directory as train.run."""
    return {**run.varied, "train.run": str(path)}


def _refuse_other(folder: Path, base: str, sweep_file: str, *, resume: bool) -> None:
    """Refuse a sweep directory in which the given sweep can neither start nor continue."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, not a directory for the sweep: name a folder with train.run")
    refuse_unwritable_place(folder)
    is_sweep = (folder / SWEEP_FILE).is_file()
    if not resume and is_sweep:
        raise InputError(
            f"{folder} already holds a sweep: add --resume to continue it, or name another directory with train.run"
        )
    if not resume and folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty: name a new directory for the sweep with train.run")
    if resume and not is_sweep:
        raise InputError(f"{folder} holds no sweep to resume: start it without --resume")
    for file, text in ((BASE_FILE, base), (SWEEP_FILE, sweep_file)):
        if not resume or not (folder / file).is_file():
            continue
        keys = differing_keys(read_configuration(folder / file), tomllib.loads(text))
        if set(keys) - {"train.run"}:
            raise InputError(
                f"{folder} holds another sweep: {folder / file} differs in {', '.join(keys[:5])}; restore them, "
                "or name another directory with train.run"
            )


def _is_finished(path: Path) -> bool:
    try:
        run = read_run(path)
    except InputError:
        return False
    return run.state is not None and run.unfinished is None


def _compare_finished(
    folder: Path, jobs: Sequence[SweepJob], failed: Mapping[str, str], equal: Equal, *, shared_machine: bool
) -> SweepResult:
    """Compare the finished runs of a sweep; raise RunFailure if there are none."""
    runs = tuple(job.run for job in jobs if job.name not in failed)
    if not runs:
        name, reason = next(iter(failed.items()))
        raise RunFailure(f"all {len(jobs)} runs of the sweep failed; the first one, {name}: {reason}")
    comparison = compare_runs(runs, equal=equal, shared_machine=shared_machine)
    return SweepResult(folder, runs, failed, comparison, comparison.draw(folder / PICTURE))


POLL_SECONDS: Final = 0.1
MARGIN: Final = 1.5
"""Another run starts only if the free memory is at least this factor times the memory of the largest run."""


class SweepInterrupted(Interrupted):
    """Raised when a signal stops a sweep; every run that had started is saved.

    Args:
        number: the signal.
        folder: the directory of the sweep.
        finished: the number of finished runs.
        total: the number of all runs.
    """

    def __init__(self, number: Signals, folder: Path, finished: int, total: int) -> None:
        super().__init__(number, folder, 0)
        self.args: tuple[Any, ...] = (
            f"Stopped by {number.name} with {finished} of {total} runs finished; everything is saved in {folder}. "
            "The same command with --resume continues from here.",
        )


@dataclass(frozen=True)
class SweepJob:
    """One run of a sweep to train.

    Attributes:
        name: the name of the run and of its directory inside the sweep's directory.
        run: the directory of the run.
        words: the arguments of `clearhead train`.
    """

    name: str
    run: Path
    words: Sequence[str]


@dataclass
class RunningSweepJob:
    """Running training process of a sweep, whose messages the sweep prints.

    Attributes:
        job: the run that the process trains.
        slot: the index of the job's environment variables in the list that `job_environments` returns.
        prefix: the start of each printed line.
        process: the training process.
        peak: the largest memory of the process seen so far, in bytes.
        num_passed: the number of messages that were printed.
    """

    job: SweepJob
    slot: int
    prefix: str
    process: TrainProcess
    peak: int = 0
    num_passed: int = 0

    def watch(self) -> None:
        """Print the new messages of the process, and measure its memory."""
        for line in self.process.messages[self.num_passed :]:
            message(f"{self.prefix}{line}")
            self.num_passed += 1
        with contextlib.suppress(psutil.Error):
            self.peak = max(self.peak, self.process.popen.memory_info().rss)

    def find_failure(self) -> str | None:
        """Return the reason why the process failed, or None if it succeeded."""
        reason = self.process.last_words()
        self.watch()
        code = self.process.popen.poll()
        if code == 0:
            return None
        return "the system killed it, probably because memory ran out" if code == -9 else reason


def train_all(jobs: Sequence[SweepJob], folder: Path, slots: Sequence[dict[str, str]], total: int) -> dict[str, str]:
    """Train the runs of a sweep in order, and return the reason of each failure by the name of the run.

    Args:
        jobs: the unfinished jobs.
        folder: the directory of the sweep.
        slots: the environment variables for each job that may run at once.
        total: the number of all runs of the sweep.

    Raises:
        SweepInterrupted: a signal stopped the sweep; its runs are saved.
    """
    waiting, running, failed = deque(jobs), list[RunningSweepJob](), dict[str, str]()
    before = total - len(jobs)
    with StopSignals() as signals:
        try:
            while waiting or running:
                if signals.received is not None:
                    break
                running = [each for each in running if not _check_ended(each, failed)]
                if waiting and len(running) < len(slots) and _has_free_memory(running):
                    slot = next(slot for slot in range(len(slots)) if slot not in [each.slot for each in running])
                    job = waiting.popleft()
                    message(f"run {before + len(jobs) - len(waiting)} of {total}: {job.name}")
                    prefix = f"{job.name}: " if len(slots) > 1 else ""
                    process = TrainProcess(job.words, job.run, environment=slots[slot])
                    running.append(RunningSweepJob(job, slot, prefix, process))
                time.sleep(POLL_SECONDS)
        finally:
            _stop(running)
        if signals.received is not None:
            finished = total - len(waiting) - len(failed) - len(running)
            raise SweepInterrupted(signals.received, folder, finished, total)
    return failed


def _check_ended(running: RunningSweepJob, failed: dict[str, str]) -> bool:
    running.watch()
    if running.process.popen.poll() is None:
        return False
    reason = running.find_failure()
    if reason is not None:
        failed[running.job.name] = reason
        message(f"{running.job.name} failed and is skipped: {reason}")
    return True


def _has_free_memory(running: Sequence[RunningSweepJob]) -> bool:
    """Return whether memory is free for one more run; False until all running jobs have begun their steps."""
    largest = max((each.peak for each in running), default=0)
    return all(each.process.has_started() for each in running) and free_memory() >= MARGIN * largest


def _stop(running: Sequence[RunningSweepJob]) -> None:
    """Stop training processes after their current step; kill those that have not saved and ended after 120 seconds."""
    for each in running:
        with contextlib.suppress(psutil.Error):
            each.process.popen.terminate()
    for each in running:
        try:
            each.process.popen.wait(timeout=120)
        except psutil.TimeoutExpired:
            each.process.popen.kill()
        each.watch()


def job_environments(runs: Sequence[RunFile], equal: Equal) -> list[dict[str, str]]:
    """Return the environment variables, such as the visible GPU, for each run that may be trained at once.

    On a CPU, the number of processors divided by train.threads limits the runs. With several GPUs, each has one run. At
    equal seconds, each run has the machine to itself.

    Args:
        runs: the run files.
        equal: the budget that is equal for all runs.
    """
    if equal == "seconds":
        return [{}]
    if choose_device(runs[0].train.device).type == "cuda":
        return _gpu_environments() if runs[0].train.device in ("auto", "cuda") else [{}]
    threads = [run.train.threads for run in runs]
    most = max((number for number in threads if number is not None), default=1)
    return [{}] if None in threads else [{}] * max(1, (os.cpu_count() or 1) // most)


def _gpu_environments() -> list[dict[str, str]]:
    """Return for each GPU the environment variable that makes only this GPU visible."""
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = named.split(",") if named else map(str, range(count))
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names][:count]
