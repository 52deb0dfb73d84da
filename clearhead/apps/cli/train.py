"""`clearhead train`: train the model of a run file, or all runs of a sweep."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.apps.cli.compare import table_columns
from clearhead.apps.cli.console import print_either, print_json, print_message, print_result, silence
from clearhead.apps.cli.options import Json, Seed, Threads
from clearhead.base.errors import InputError, RunFailure

if TYPE_CHECKING:
    from clearhead.training.parallel.world import Process

Sweep = Annotated[
    list[str] | None,
    typer.Option("--sweep", metavar="KEY=V,W", help="Train a run per value, such as train.seed=1..3; or a sweep file."),
]
Equal = Annotated[
    str | None,
    typer.Option("--equal", metavar="WHAT", help="For a sweep: steps (the default), tokens, seconds or parameters."),
]


def train(
    file: Annotated[str, typer.Argument(metavar="FILE.toml", help="The run file, or a run directory to continue.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="table.key=value", help="Changes to it.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last undamaged checkpoint.")] = False,
    sweep: Sweep = None,
    equal: Equal = None,
    device: Annotated[str | None, typer.Option("--device", help="Set train.device: auto, cpu, cuda or mps.")] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="Set train.precision: auto, fp32 or bf16.")
    ] = None,
    threads: Threads = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Set train.batch_tokens: padded tokens in one batch.")
    ] = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Train the model of a run file.

    \b
    Example:
      clearhead train run.toml
      clearhead train run.toml train.steps=20000 train.run=runs/second
      clearhead train run.toml --resume

    torchrun starts several processes, also on several machines: torchrun --nproc-per-node 2 -m clearhead train run.toml

    Relative paths in the run file are relative to the current directory; paths of custom modules are relative to the
    run file. The custom modules of a run directory are code and need --parts FILE. Ctrl-C and SIGTERM finish the step,
    save, and print how to resume. With early_stop = { metric, patience }, training stops after `patience` validations
    in a row without a better metric. With --json, the last line is {"run", "step", "best", "seconds"}.

    --sweep KEY=VALUES, once per key, trains every combination of values at an equal budget, each in a directory inside
    train.run. It ends with the table and the picture of `clearhead compare`. A failed run is named and skipped.
    To continue a sweep, add --resume, or give the sweep's directory as FILE.toml. With --json, the last line has
    {"sweep", "runs", "failed"} and the keys of compare. Example:
    clearhead train run.toml --sweep model.norm_place=pre,post --sweep train.seed=1..3 --equal tokens
    """
    options = {
        "train.device": device,
        "train.precision": precision,
        "train.threads": threads,
        "train.batch_tokens": batch_size,
        "train.seed": seed,
    }
    words = list(overrides or [])
    words += [f"{key}={value}" for key, value in options.items() if value is not None]
    if is_sweep(file, sweep, equal):
        with _print_faults_once():
            train_sweep(Path(file), words, sweep or [], equal, resume=resume, as_json=as_json)
    else:
        _train(Path(file), words, resume=resume, as_json=as_json)


def _train(path: Path, words: list[str], *, resume: bool, as_json: bool) -> None:
    """Train one run, and print its result in the first process."""
    from clearhead.training.runfile.read import load_run_file

    is_of_run = path.is_dir()
    if is_of_run:
        resume = True
        # The named folder is the run, even if it was copied or moved.
        words.insert(0, f"train.run={json.dumps(str(path))}")
        path = path / "run.toml"
    with share_faults() as process:
        run_file = load_run_file(path, words, is_of_run=is_of_run)
    # Import late: the libraries for training take seconds to load; a fault in the run file is reported before.
    from clearhead.training.assemble import train_run
    from clearhead.training.summary import summary_lines

    with _silence_followers():
        result = train_run(run_file, resume=resume)
    if process.rank:
        return
    for line in summary_lines(result, run_file):
        print_message(line)
    if as_json:
        print_json(
            {"run": str(result.run), "step": result.step, "best": result.best, "seconds": round(result.seconds, 2)}
        )
    else:
        print_result(str(result.run))


@contextlib.contextmanager
def _print_faults_once() -> Iterator[None]:
    """Print faults in the first process only, if all processes of torchrun or Slurm find the same faults."""
    try:
        yield
    except InputError:
        if (os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")) != "0":
            silence(sys.stderr)
        raise


@contextlib.contextmanager
def _silence_followers() -> Iterator[None]:
    """Silence this process if another process reports the failure."""
    from clearhead.training.parallel.world import FailedElsewhere

    try:
        yield
    except FailedElsewhere:
        silence(sys.stderr)
        raise


@contextlib.contextmanager
def share_faults() -> Iterator[Process]:
    """Send wrong input found inside a with block to the other processes of a training, so that they do not wait."""
    from clearhead.training.parallel.world import Process

    with _print_faults_once():
        process = Process.here()
    if process.size == 1:
        yield process
        return
    # Import late: it loads PyTorch, which a single process does not need here.
    from clearhead.training.parallel.meeting import reporting_faults

    with _silence_followers(), reporting_faults(process):
        yield process


def is_sweep(file: str, swept: Sequence[str] | None, equal: str | None) -> bool:
    """Return whether a command line asks for a sweep or names the directory of a sweep."""
    return bool(swept) or equal is not None or Path(file, "sweep.toml").is_file()


def train_sweep(
    path: Path, words: list[str], swept: list[str], equal: str | None, *, resume: bool, as_json: bool
) -> None:
    """Train and compare the runs of a sweep.

    Args:
        path: the run file, or the directory of a sweep to continue.
        words: changes for all runs, as texts `table.key=value`.
        swept: texts KEY=VALUES, or the path of a sweep file.
        equal: the budget that is equal for all runs. None means the budget of the sweep file; without a sweep
            file, the steps.
        resume: True to continue a sweep.
        as_json: True to print the result as one JSON object.

    Raises:
        InputError: the sweep is impossible; no run was trained.
        RunFailure: some runs failed; the others are in the table.
    """
    from clearhead.apps.sweeps.variations import BASE_FILE, SWEEP_FILE, parse_budget, parse_variation
    from clearhead.base.files import read_text_file

    folder = None if path.is_dir() else path.parent
    if path.is_dir():
        if swept or not (path / SWEEP_FILE).is_file():
            raise InputError(f"{path} is a directory: give a run file, or a sweep's directory without --sweep")
        words.insert(0, f"train.run={json.dumps(str(path))}")
        path, swept, resume = path / BASE_FILE, [str(path / SWEEP_FILE)], True
    if not swept:
        raise InputError("--equal has no effect without --sweep: name keys to vary, such as --sweep train.seed=1..3")
    variation, named = parse_variation(swept)
    budget = parse_budget(equal) if equal is not None else named or "steps"
    text = read_text_file(path, "run file")
    # Import late: it loads torch; a fault in the words is reported before.
    from clearhead.apps.sweeps.api import run_sweep

    result = run_sweep(text, str(path), words, variation, budget, resume=resume, folder=folder)
    print_either(as_json, result.record(), *result.comparison.lines(table_columns()))
    if result.failed:
        raise RunFailure(f"runs failed and are not in the table: {', '.join(result.failed)}; --resume tries them again")
