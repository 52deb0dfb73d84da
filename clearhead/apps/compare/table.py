"""Rows of a comparison: runs that differ only in their seed share a row, with mean and standard deviation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from clearhead.apps.compare.runs import ComparedRun, Quality, read_run
from clearhead.base.errors import InputError
from clearhead.base.printing import Printed
from clearhead.checkpoints.runs.directory import differing_keys, flatten_keys
from clearhead.spec.cost import training_flops

SEED_KEYS: Final = ("train.run", "train.seed")


@dataclass(frozen=True, repr=False)
class Spread(Printed):
    """Mean and standard deviation of a number, such as the best loss, over the seeds of one table row.

    Attributes:
        mean: the mean over the seeds.
        deviation: the sample standard deviation. None means that there is one seed.
        count: the number of seeds for which the number is known.
    """

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[int | float | None]) -> Spread | None:
        """Return the spread of the numbers that are not None, or None if there are none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(fmean(known), stdev(known) if len(known) > 1 else None, len(known))


@dataclass(frozen=True, repr=False)
class ComparisonRow(Printed):
    """One row of the table: all seeds of one configuration.

    Attributes:
        name: the name of the row, unique in the table.
        runs: the runs of the row, in the given order.
    """

    name: str
    runs: tuple[ComparedRun, ...]

    @property
    def first(self) -> ComparedRun:
        """The first run of the row, which stands for all seeds where their values are equal."""
        return self.runs[0]

    @property
    def seeds(self) -> list[int]:
        """The seeds in ascending order."""
        return sorted(run.seed for run in self.runs)

    @property
    def flops(self) -> Spread | None:
        """Training FLOPs, or None if the runs have not recorded their token counts."""
        return self.spread(lambda run: None if run.work is None else training_flops(run.spec, run.work))

    @property
    def tokens(self) -> Spread:
        """Training tokens seen."""
        return self._spread_or_fail(lambda run: run.metrics[-1].tokens)

    @property
    def steps(self) -> Spread:
        """Optimizer steps taken."""
        return self._spread_or_fail(lambda run: run.metrics[-1].step)

    @property
    def seconds(self) -> Spread:
        """Wall-clock seconds, including validations."""
        return self._spread_or_fail(lambda run: run.metrics[-1].seconds)

    @property
    def tokens_per_second(self) -> Spread | None:
        """Training tokens per second, without validations; None if unknown."""
        return self.spread(lambda run: run.tokens_per_second)

    def best(self, quality: Quality) -> Spread | None:
        """Return the spread of the best validations, or None without validations."""
        return self.spread(lambda run: run.best(quality))

    def spread(self, value: Callable[[ComparedRun], int | float | None]) -> Spread | None:
        """Return the spread of a number over the seeds, or None if no seed has it."""
        return Spread.of([value(run) for run in self.runs])

    def _spread_or_fail(self, value: Callable[[ComparedRun], int | float]) -> Spread:
        summary = self.spread(value)
        assert summary is not None, "a run must have metrics"
        return summary


def read_rows(paths: Sequence[Path]) -> list[ComparisonRow]:
    """Read runs, and group the seeds of each configuration into rows, in the order of their first run.

    Args:
        paths: the run directories, at least one.

    Raises:
        InputError: a run cannot be read or is named twice, or the tasks differ; all faults in one report.
    """
    faults, runs, seen = [], [], dict[Path, Path]()
    for path in paths:
        resolved = path.resolve()
        if resolved in seen:
            faults.append(f"{path} is named twice (also as {seen[resolved]}): name each run once")
            continue
        seen[resolved] = path
        try:
            runs.append(read_run(path))
        except InputError as error:
            faults.append(error.as_fault)
    if faults:
        raise InputError.from_faults(faults, subject="the comparison")
    _refuse_mixed_tasks(runs)
    groups: list[list[ComparedRun]] = []
    for run in runs:
        alike = next((group for group in groups if is_seed_of(run, group[0])), None)
        groups.append([run]) if alike is None else alike.append(run)
    return [ComparisonRow(name, tuple(group)) for name, group in zip(_names(groups), groups, strict=True)]


def is_seed_of(run: ComparedRun, other: ComparedRun) -> bool:
    """Return whether two runs differ at most in seed and directory."""
    return not set(differing_keys(run.configuration, other.configuration)) - set(SEED_KEYS)


def differing_values(rows: Sequence[ComparisonRow]) -> dict[str, list[Any]]:
    """Return the run-file keys in which rows differ, each with its value in every row, None if not set."""
    tables = [flatten_keys(row.first.configuration) for row in rows]
    keys = sorted(
        {key for table in tables for key in differing_keys(tables[0], table)} - set(SEED_KEYS), key=_table_order
    )
    return {key: [table.get(key) for table in tables] for key in keys}


def _table_order(key: str) -> tuple[int, str]:
    """Return the sort key of a dotted key: the position of its table in a run file."""
    tables = ("task", "data", "tokenizer", "model", "train")
    table = key.partition(".")[0]
    return (tables.index(table) if table in tables else len(tables)), key


def _refuse_mixed_tasks(runs: Sequence[ComparedRun]) -> None:
    first = runs[0]
    for run in runs:
        if run.task != first.task:
            raise InputError(
                f"{run.path} has the task '{run.task}', but {first.path} has the task '{first.task}': compare runs of "
                "the same task"
            )


def _names(groups: Sequence[Sequence[ComparedRun]]) -> list[str]:
    """Return short unique names of rows: their folders, or the common prefix of the folders of several seeds."""
    for parts in (1, 2):
        names = [_name(["/".join(run.path.resolve().parts[-parts:]) for run in group]) for group in groups]
        if len(set(names)) == len(names):
            return names
    return [str(group[0].path) for group in groups]


def _name(paths: Sequence[str]) -> str:
    if len(paths) == 1:
        return paths[0]
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*paths, strict=False))
    shared = "".join(letters[0] for letters in alike)
    if any(path[len(shared) : len(shared) + 1].isdigit() for path in paths):
        # "dates-1" and "dates-12" share "dates-1", the name of one of them: drop the digits
        shared = shared.rstrip("0123456789")
    shared = shared.removesuffix("seed").rstrip("-_.")
    return paths[0] if not shared or shared.endswith("/") else shared
