"""`clearhead train`: from a run file to a run directory."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from clearhead.apps.cli.console import print_json, print_message, print_result, silence
from clearhead.apps.cli.options import Json, Seed, Threads
from clearhead.apps.cli.sweep import Equal, Sweep, is_sweep, train_sweep
from clearhead.base.errors import InputError


def train(
    file: Annotated[str, typer.Argument(metavar="FILE.toml", help="The run file, or a run directory to continue.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="table.key=value", help="Changes to it.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last undamaged checkpoint.")] = False,
    sweep: Sweep = None,
    equal: Equal = None,
    device: Annotated[str | None, typer.Option("--device", help="As train.device: auto, cpu, cuda or mps.")] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="As train.precision: auto, fp32 or bf16.")
    ] = None,
    threads: Threads = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="As train.batch_tokens: padded tokens in one batch.")
    ] = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Train a model from a run file.

    \b
    Example:
      clearhead train run.toml
      clearhead train run.toml train.steps=20000 train.run=runs/second
      clearhead train run.toml --resume

    torchrun starts several processes, also on several machines: torchrun --nproc-per-node 2 -m clearhead train run.toml

    Relative paths in the run file are relative to the current directory, that of its parts to its own folder. The parts
    of a run directory are code and need --parts FILE. Ctrl-C and SIGTERM finish the step, save, and
    say how to resume. With early_stop = { metric, patience } training stops once that many validations in a row have
    not improved the metric. --json ends with {"run", "step", "best", "seconds"}.

    --sweep, once for each key, trains every combination of values in a directory inside train.run, at an equal budget,
    and ends in the table and the picture of `clearhead compare`. A run that fails is named and skipped. --resume, or
    the sweep's directory as FILE.toml, continues the whole. --json ends with {"sweep", "runs", "failed"} and compare's:
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
        train_sweep(Path(file), words, sweep or [], equal, resume=resume, as_json=as_json)
    else:
        _train(Path(file), words, resume=resume, as_json=as_json)


def _train(path: Path, words: list[str], *, resume: bool, as_json: bool) -> None:
    """Train, and tell the result; of several processes the first one does."""
    from clearhead.training.runfile.read import load_run_file

    is_of_run = path.is_dir()
    if is_of_run:
        resume = True
        # The folder that was named is the run: a copied or moved one goes on in its own place.
        words.insert(0, f"train.run={json.dumps(str(path))}")
        path = path / "run.toml"
    with _told_once():
        run_file = load_run_file(path, words, is_of_run=is_of_run)
    # Only now: the libraries for training take seconds to load, and a fault in the run file should not wait for them.
    from clearhead.training.assemble import train_run
    from clearhead.training.parallel.processes import Process, Quiet
    from clearhead.training.summary import summary_lines

    try:
        result = train_run(run_file, resume=resume)
    except Quiet:
        silence(sys.stderr)
        raise
    if Process.here().rank:
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
def _told_once() -> Iterator[None]:
    """Let one process of each machine tell of a fault that all of them find."""
    try:
        yield
    except InputError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            silence(sys.stderr)
        raise
