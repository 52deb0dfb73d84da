"""`clearhead check run.toml`: whether this job resumes exactly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from clearhead.apps.cli.console import print_either
from clearhead.base.errors import InputError

Steps = Annotated[int | None, typer.Option("--steps", min=1, help="Of a run file: how many steps to train.")]
Kills = Annotated[int | None, typer.Option("--kills", min=1, help="Of a run file: how often to kill; by default 5.")]


def is_run_file(ref: str) -> bool:
    """Return whether what is to be checked is a run file."""
    return ref.endswith(".toml") and not Path(ref).is_dir()


def is_certificate(ref: str) -> bool:
    """Return whether what is to be checked is the certificate of a job, in a file."""
    return ref.endswith(".json") and Path(ref).is_file()


def check_certificate(file: str, options: Mapping[str, object], *, as_json: bool) -> None:
    """Show a certificate, and exit with 1 where it does not hold any more.

    Raises:
        InputError: it cannot be read, or an option is given.
    """
    for name, value in options.items():
        if value is not None:
            raise InputError(f"{file} is a certificate: {name} would have no effect; leave that out")
    from clearhead.apps.check.job.job import read_certificate

    record, lines = read_certificate(Path(file))
    print_either(as_json, record, *lines)
    if not record["ok"]:
        raise typer.Exit(1)


def check_run_file(file: str, *, steps: int | None, kills: int | None, seed: int | None, as_json: bool) -> None:
    """Check a job, print the certificate, and exit with 1 where something is wrong.

    Raises:
        InputError: the job cannot be trained.
    """
    # Only now: the libraries for training take seconds to load, and a fault in the run file should not wait for them.
    from clearhead.training.runfile.read import load_run_file

    load_run_file(Path(file))
    from clearhead.apps.check.job.job import check_job

    report = check_job(file, steps=steps, kills=5 if kills is None else kills, seed=seed)
    print_either(as_json, report.record(), *report.lines())
    if not report.is_right:
        raise typer.Exit(1)
