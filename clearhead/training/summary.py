"""The summary of a run that has ended: its best checkpoint, and the commands to go on with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from clearhead.base.commands import make_command, quote
from clearhead.checkpoints.runs.checkpoint import checkpoint_folder
from clearhead.checkpoints.runs.directory import RUN_FILE
from clearhead.spec.describe import count_noun
from clearhead.spec.tasks.registry import find_task
from clearhead.training.progress.reports import duration
from clearhead.training.record import STARTUP_SECONDS, RunResult
from clearhead.training.runfile.sections import RunFile

MUCH_LESS: Final = 0.6
"""Of the planned time."""


def summary_lines(result: RunResult, run_file: RunFile) -> list[str]:
    """Return the summary of a run as lines of text.

    Args:
        result: of the run.
        run_file: that described it.
    """
    lines = []
    if result.best is not None and result.best_value is not None:
        step = int(result.best.removeprefix("step-"))
        folder = quote(str(checkpoint_folder(result.run, step)))
        lines.append(f"best      {result.best_by} {result.best_value:.4g} at step {step:,}: {folder}")
    if result.averaged is not None:
        score = "" if result.averaged.score is None else f", score {result.averaged.score:.4g}"
        name = quote(f"{result.run}@averaged")
        lines.append(f"averaged  validation loss {result.averaged.loss:.4g}{score}: {name}")
    lines += _suggest_longer_run(result, run_file)
    commands = next_commands(result.run, run_file)
    return lines + [f"{'next' if index == 0 else '':<8}  {command}" for index, command in enumerate(commands)]


def _suggest_longer_run(result: RunResult, run_file: RunFile) -> list[str]:
    """Say that a run took much less time than was planned for it, and how to make it longer."""
    minutes, steps = run_file.train.planned_minutes, run_file.train.steps
    if minutes is None or steps is None or result.step < steps:
        return []
    planned = 60 * minutes - STARTUP_SECONDS
    if result.seconds >= MUCH_LESS * planned:
        return []
    more = math.floor(steps * planned / result.seconds)
    words = ["train", str(result.run / RUN_FILE), f"train.steps={more}", f"train.run={result.run}-longer"]
    took = f"{count_noun(steps, 'step')} took {duration(result.seconds)} of the {minutes:g} min planned"
    return [f"shorter   {took}; for a run that takes all of it: {make_command(' '.join(map(quote, words)))}"]


def next_commands(run: Path, run_file: RunFile) -> list[str]:
    """Return the commands that measure and use the model of a run; words in capitals stand for what the user has.

    Args:
        run: the run directory.
        run_file: that described it.
    """
    name = quote(str(run))
    use = find_task(run_file.task.kind).used_with.format(run=name)
    return [make_command(f"evaluate {name}"), make_command(use)]
