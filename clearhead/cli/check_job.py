"""`clearhead check run.toml`: whether this job resumes exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.console import print_either

Steps = Annotated[int | None, typer.Option("--steps", min=1, help="Of a run file: how many steps to train.")]
Kills = Annotated[int | None, typer.Option("--kills", min=1, help="Of a run file: how often to kill; by default 5.")]


def is_run_file(ref: str) -> bool:
    """Return whether what is to be checked is a run file."""
    return ref.endswith(".toml") and not Path(ref).is_dir()


def check_run_file(file: str, *, steps: int | None, kills: int | None, seed: int | None, as_json: bool) -> None:
    """Check a job, print the certificate, and exit with 1 where something is wrong.

    Raises:
        InputError: the job cannot be trained.
    """
    # Only now: the libraries for training take seconds to load, and a fault in the run file should not wait for them.
    from clearhead.training.runfile.read import load_run_file

    load_run_file(Path(file))
    from clearhead.check.job.job import check_job

    report = check_job(file, steps=steps, kills=5 if kills is None else kills, seed=seed)
    print_either(as_json, report.record(), *report.lines())
    if not report.is_right:
        raise typer.Exit(1)
