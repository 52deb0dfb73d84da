"""A job trained once undisturbed and again with kills: at random moments, inside saving and inside validation."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import psutil

from clearhead.apps.check.job.forecast import Job
from clearhead.apps.train_process import TrainProcess
from clearhead.base.errors import RunFailure
from clearhead.base.progress import message
from clearhead.checkpoints.runs.checkpoint import checkpoint_steps
from clearhead.checkpoints.runs.metrics import FILE_NAME, read_metrics

Moment = Literal["saving", "validation", "random"]
_WRITING: Final = re.compile(r"\.step-([0-9]+)\.writing-([0-9]+)-.*")
_VALIDATING: Final = re.compile(r"step ([0-9]+)  validating")
FORCED: Final[tuple[Moment, ...]] = ("validation", "saving")


@dataclass(frozen=True)
class Kill:
    """One SIGKILL.

    Attributes:
        moment: inside what it came.
        after: the step of the newest checkpoint then; None: there was none.
    """

    moment: Moment
    after: int | None

    def __str__(self) -> str:
        """Return it in words."""
        when = {"saving": "while saving", "validation": "in a validation", "random": "at a random moment"}[self.moment]
        return f"{when} {'before the first checkpoint' if self.after is None else f'after step {self.after}'}"


@dataclass
class KilledRun:
    """A run that was killed and resumed until it reached the last step.

    Attributes:
        run: its directory.
        kills: in order.
        failure: why it could not go on; empty: it could.
    """

    run: Path
    kills: list[Kill] = field(default_factory=list)
    failure: str = ""


def undisturbed_run(job: Job) -> tuple[Path, float]:
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


def killed_runs(job: Job, kills: int, draw: random.Random, seconds: float) -> list[KilledRun]:
    """Train the same with kills; where a run reaches the last step before all of them, another one takes the rest.

    Args:
        job: to train.
        kills: how many; the first two are inside saving and inside validation.
        draw: of the moments and their order.
        seconds: that an undisturbed run took.
    """
    moments: list[Moment] = [FORCED[number] if number < len(FORCED) else "random" for number in range(kills)]
    draw.shuffle(moments)
    runs: list[KilledRun] = []
    # A save that is over in a moment can be missed: so many attempts at most.
    while moments and len(runs) < kills + 3:
        runs.append(KilledRun(job.folder / f"killed-{len(runs) + 1}"))
        try:
            while moments and _killed(job, runs[-1], moments, draw, seconds):
                moments.pop(0)
            with job.train(runs[-1].run) as process:
                _reach_the_end(job, process)
        except RunFailure as error:
            if not runs[-1].kills:
                raise
            runs[-1].failure = str(error)
            break
    return runs


def _reach_the_end(job: Job, process: TrainProcess) -> None:
    """Wait for the last step.

    Raises:
        RunFailure: the training ended before.
    """
    if not process.wait_until(lambda: process.has_saved(job.steps)):
        raise RunFailure(f"clearhead train ended before step {job.steps}: {process.last_words()}")


def _killed(job: Job, killed: KilledRun, moments: Sequence[Moment], draw: random.Random, seconds: float) -> bool:
    """Continue a run and kill it at the first of the moments to come; return whether that was before its last step."""
    newest, moment = max(checkpoint_steps(killed.run), default=-1), moments[0]
    if newest >= job.steps:
        return False
    # Of what is left of the run so much that the later kills fall on the rest of it.
    rest = seconds * (1 - max(0, newest) / job.steps) * 2 / (len(moments) + 1)
    steps = [step for step in job.moments(moment) if step > newest]
    # One that cannot be reached lies behind the last step.
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
            # Too late for this one: the next one from its beginning.
            pause = 0.0
    return False


def _wait(process: TrainProcess, seconds: float, is_over: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    process.wait_until(lambda: time.monotonic() > end or is_over())


def _kill_inside(process: TrainProcess, is_inside: Callable[[], bool]) -> bool:
    """Suspend the process, kill it if it is still at a moment, and return whether it was."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.popen.suspend()
        if is_inside():
            process.kill()
            return True
        process.popen.resume()
    return False


def _is_saving(process: TrainProcess, step: int) -> bool:
    """Return whether the process writes the checkpoint of a step, or of a later one."""
    with contextlib.suppress(OSError):
        writes = (_WRITING.fullmatch(path.name) for path in (process.run / "checkpoints").iterdir())
        # The files of a killed process stay there until this process has started.
        return any(write and int(write[1]) >= step and int(write[2]) == process.popen.pid for write in writes)
    return False


def _is_validating(process: TrainProcess, step: int) -> bool:
    """Return whether the process validates a step, or a later one."""
    starts = filter(None, map(_VALIDATING.fullmatch, reversed(process.messages)))
    validated = next((int(start[1]) for start in starts), -1)
    return validated >= step and not any(row.step == validated for row in read_metrics(process.run / FILE_NAME)[-1:])
