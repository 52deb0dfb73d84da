"""The sweep of `clearhead train`: its options, its runs and their table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from clearhead.apps.cli.compare import table_columns
from clearhead.apps.cli.console import print_either
from clearhead.base.errors import InputError, RunFailure

Sweep = Annotated[
    list[str] | None,
    typer.Option("--sweep", metavar="KEY=V,W", help="A run for each value, such as train.seed=1..3; or a sweep file."),
]
Equal = Annotated[
    str | None,
    typer.Option("--equal", metavar="WHAT", help="Of a sweep: steps (the default), tokens, seconds or parameters."),
]


def is_sweep(file: str, swept: Sequence[str] | None, equal: str | None) -> bool:
    """Return whether a command line asks for a sweep, or names the directory of one."""
    return bool(swept) or equal is not None or Path(file, "sweep.toml").is_file()


def train_sweep(
    path: Path, words: list[str], swept: list[str], equal: str | None, *, resume: bool, as_json: bool
) -> None:
    """Train and compare the runs of a sweep.

    Args:
        path: the run file, or the directory of a sweep to continue.
        words: changes to it for all runs, as texts `table.key=value`.
        swept: KEY=VALUES each, or a sweep file.
        equal: what all runs have in common; None: as the sweep file says, or the steps.
        resume: whether to continue a sweep.
        as_json: whether the result is one JSON object.

    Raises:
        InputError: nothing was trained, for what is asked for cannot be.
        RunFailure: runs failed; the others are in the table.
    """
    from clearhead.apps.sweeps.variations import BASE_FILE, SWEEP_FILE, equal_of, variation_of
    from clearhead.base.files import read_text_file

    folder = None if path.is_dir() else path.parent
    if path.is_dir():
        if swept or not (path / SWEEP_FILE).is_file():
            raise InputError(f"{path} is a directory: begin a sweep with a run file, or continue one by its directory")
        words.insert(0, f"train.run={json.dumps(str(path))}")
        path, swept, resume = path / BASE_FILE, [str(path / SWEEP_FILE)], True
    if not swept:
        raise InputError("--equal is for a sweep: name what is varied with --sweep, such as --sweep train.seed=1..3")
    variation, named = variation_of(swept)
    budget = equal_of(equal) if equal is not None else named or "steps"
    text = read_text_file(path, "run file")
    # Only now: it loads torch, for which a fault in the words need not wait.
    from clearhead.apps.sweeps.api import run_sweep

    result = run_sweep(text, str(path), words, variation, budget, resume=resume, folder=folder)
    print_either(as_json, result.record(), *result.comparison.lines(table_columns()))
    if result.failed:
        raise RunFailure(f"not in the table, for they failed: {', '.join(result.failed)}; --resume tries them again")
