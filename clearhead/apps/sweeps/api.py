"""A sweep from Python: every fault before anything runs, then the runs, then their comparison."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clearhead.apps.compare.report import Comparison, compare_runs
from clearhead.apps.compare.runs import read_run
from clearhead.apps.sweeps.budgets import Planned, budget_of, check_budget
from clearhead.apps.sweeps.processes import Job, places, train_all
from clearhead.apps.sweeps.variations import BASE_FILE, SWEEP_FILE, Equal, Variation, names_of
from clearhead.base.arguments import checked
from clearhead.base.errors import InputError, RunFailure
from clearhead.base.files import read_text_file, refuse_unwritable_place
from clearhead.base.printing import Printed
from clearhead.base.progress import message
from clearhead.checkpoints.runs.directory import RunDirectory, acquire_lock, differing_keys, read_configuration
from clearhead.core.extensions.files import parts_options
from clearhead.training.parallel.processes import Process
from clearhead.training.runfile.read import parse_run_file, parse_tables, parts_folder, toml_text, toml_value

PICTURE: Final = "compare.png"


@dataclass(frozen=True, repr=False)
class SweepResult(Printed):
    """The result of a sweep; as a string it is the table of its runs.

    Attributes:
        folder: the directory of the sweep.
        runs: the directories of the runs that are finished.
        failed: names of the others, each with the reason.
        comparison: of the finished runs.
        picture: their learning curves; None: none was validated.
    """

    folder: Path
    runs: tuple[Path, ...]
    failed: Mapping[str, str]
    comparison: Comparison
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


@checked
def sweep(
    run_file: str | Path | Mapping[str, Any],
    vary: Mapping[str, Any] | Sequence[Any],
    *,
    equal: Equal = "steps",
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> SweepResult:
    """Train one run for each of several changes to a run file at an equal budget, and compare them.

    Args:
        run_file: the path of a run file, or its tables. The directory of the sweep is its train.run, in which each run
            has a directory.
        vary: dotted key -> values, which are combined in every way; or a list with the keys and values of each run.
        equal: what all runs have in common: steps, tokens (steps are chosen), seconds, or steps and parameters (widths
            are chosen).
        overrides: dotted key -> value, for all runs.
        resume: whether to continue a sweep: finished runs stay, others continue or begin.

    Returns:
        the runs, their table and their picture.

    Raises:
        InputError: the sweep, a run file or the data cannot be used; nothing was trained.
        RunFailure: every run failed.
    """
    if isinstance(run_file, Mapping):
        text, name, folder = toml_text(run_file), "the run file", parts_folder(Path("run.toml"))
    else:
        text, name, folder = read_text_file(Path(run_file), "run file"), str(run_file), parts_folder(Path(run_file))
    words = [f"{key}={toml_value(value)}" for key, value in (overrides or {}).items()]
    if isinstance(vary, Mapping):
        return run_sweep(text, name, words, Variation(vary), equal, resume=resume, folder=folder)
    if not all(isinstance(run, Mapping) for run in vary):
        raise InputError("a list of runs holds a dictionary of keys and values for each of them")
    return run_sweep(text, name, words, Variation({}, vary), equal, resume=resume, folder=folder)


def run_sweep(
    text: str, name: str, words: Sequence[str], variation: Variation, equal: Equal, *, resume: bool, folder: Path | None
) -> SweepResult:
    """Train and compare the runs of a sweep.

    Args:
        text, name: of the run file.
        words: changes to it for all runs, as texts `table.key=value`.
        variation: what is varied.
        equal: what all runs have in common.
        resume: whether to continue a sweep.
        folder: as for `parse_run_file`.

    Raises:
        InputError: the sweep, a run file or the data cannot be used; nothing was trained.
        RunFailure: every run failed.
    """
    if Process.here().size > 1:
        raise InputError("a sweep starts its runs by itself: call it without torchrun")
    runs = planned(text, name, words, variation, folder)
    check_budget(variation.keys, runs, equal)
    tables = parse_tables(text, name, words)
    # The runs get the files of parts that were imported here: the directory of a sweep names no code.
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
        names = names_of([run.varied for run in runs])
        jobs = [
            Job(each, folder / each, [*words_before, *_assigned(_placed(run, folder / each)), *texts])
            for each, run, texts in zip(names, runs, changes, strict=True)
        ]
        waiting = [job for job in jobs if not _is_finished(job.run)]
        if len(waiting) < len(jobs):
            message(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are finished already")
        slots = places([run.run_file for run in runs], equal)
        failed = train_all(waiting, folder, slots[: len(waiting)], len(jobs))
        return _compared(folder, jobs, failed, equal, beside=min(len(slots), len(jobs)) > 1)


def planned(
    text: str, name: str, words: Sequence[str], variation: Variation, folder: Path | None = Path()
) -> list[Planned]:
    """Read the run file with the changes of each run.

    Args:
        text, name, words, folder: as for `run_sweep`.
        variation: what is varied.

    Raises:
        InputError: the first fault of the sweep, of the run file, or of the run file with the changes of a run.
    """
    varied = variation.configurations()
    parse_run_file(text, name, words, folder=folder)
    twice = [key for key in variation.keys if any(word.partition("=")[0].strip() == key for word in words)]
    if twice:
        raise InputError(f"{twice[0]} is swept and set for all runs at once: do one of both")
    runs = []
    for configuration in varied:

        def reread(changes: Sequence[str], configuration: Mapping[str, Any] = configuration) -> Any:
            return parse_run_file(text, name, [*words, *_assigned(configuration), *changes], folder=folder)

        runs.append(Planned(configuration, reread([]), reread))
    return runs


def _assigned(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={toml_value(value)}" for key, value in values.items()]


def _placed(run: Planned, path: Path) -> Mapping[str, Any]:
    """Return the keys and values of a run, with its directory."""
    return {**run.varied, "train.run": str(path)}


def _refuse_other(folder: Path, base: str, sweep_file: str, *, resume: bool) -> None:
    """Refuse a directory in which this sweep can neither begin nor continue."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"the directory of the sweep, {folder}, is a file: name a folder with train.run")
    refuse_unwritable_place(folder)
    is_sweep = (folder / SWEEP_FILE).is_file()
    if not resume and is_sweep:
        raise InputError(
            f"{folder} holds a sweep already: add --resume to continue it, or name another directory with train.run"
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
                f"{folder} holds another sweep, whose {folder / file} differs in {', '.join(keys[:5])}: restore that, "
                "or name another directory with train.run"
            )


def _is_finished(path: Path) -> bool:
    try:
        run = read_run(path)
    except InputError:
        return False
    return run.state is not None and run.unfinished is None


def _compared(
    folder: Path, jobs: Sequence[Job], failed: Mapping[str, str], equal: Equal, *, beside: bool
) -> SweepResult:
    """Compare the finished runs of a sweep."""
    runs = tuple(job.run for job in jobs if job.name not in failed)
    if not runs:
        name, reason = next(iter(failed.items()))
        raise RunFailure(f"all {len(jobs)} runs of the sweep failed; the first of them, {name}: {reason}")
    comparison = compare_runs(runs, equal=equal, beside=beside)
    return SweepResult(folder, runs, failed, comparison, comparison.draw(folder / PICTURE))
