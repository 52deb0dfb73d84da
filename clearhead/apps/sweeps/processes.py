"""The runs of a sweep as processes: one after the other, or several at once where processors and memory allow it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from signal import Signals
from typing import Any, Final

import psutil
import torch

from clearhead.apps.sweeps.variations import Equal
from clearhead.base.errors import shortened
from clearhead.base.machine import SAFE_PATH, choose_device, free_memory
from clearhead.base.progress import message
from clearhead.base.signals import Interrupted, StopSignals
from clearhead.checkpoints.runs.checkpoint import checkpoint_steps
from clearhead.training.runfile.sections import RunFile

POLL_SECONDS: Final = 0.1
MARGIN: Final = 1.5
"""One run more begins only where so many times the memory of the largest one is free."""


class SweepInterrupted(Interrupted):
    """A signal stopped a sweep; every run that had begun is saved.

    Args:
        number: the signal.
        folder: the directory of the sweep.
        finished: how many runs are finished.
        total: how many there are.
    """

    def __init__(self, number: Signals, folder: Path, finished: int, total: int) -> None:
        super().__init__(number, folder, 0)
        self.args: tuple[Any, ...] = (
            f"Stopped by {number.name} with {finished} of {total} runs finished; everything is saved in {folder}. "
            "The same command with --resume continues from here.",
        )


@dataclass(frozen=True)
class Job:
    """A run to train.

    Attributes:
        name: of the run, and of its directory in that of the sweep.
        run: its directory.
        words: of the command `clearhead train`.
    """

    name: str
    run: Path
    words: Sequence[str]


@dataclass
class Process:
    """A job in a process of its own; what it says is passed on.

    Attributes:
        job: that it trains.
        slot: the number of its place among those that run at once.
        prefix: of each line that is passed on.
        environment: its variables.
        has_begun: once its first step does.
        peak: the most memory that it was seen to hold, in bytes.
        lines: that were not passed on yet.
        last: the last one that was.
    """

    job: Job
    slot: int
    prefix: str
    environment: dict[str, str]
    has_begun: bool = False
    peak: int = 0
    lines: deque[str] = field(default_factory=deque)
    last: str = "it said nothing"

    def __post_init__(self) -> None:
        resume = ["--resume"] if checkpoint_steps(self.job.run) else []
        # A group of its own: Ctrl-C is for the sweep, which passes it on.
        self.popen: psutil.Popen = psutil.Popen(
            [sys.executable, "-m", "clearhead", "train", *self.job.words, *resume],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=self.environment,
            text=True, encoding="utf-8", errors="replace", start_new_session=True,
        )  # fmt: skip
        self.reader: threading.Thread = threading.Thread(target=self._read, args=(self.popen.stderr,), daemon=True)
        self.reader.start()

    def _read(self, said: TextIOWrapper) -> None:
        with said:
            for line in said:
                self.lines.append(line.rstrip("\n"))
                self.has_begun |= line.startswith("training ")

    def pass_on(self) -> None:
        """Tell what it said since the last time, and look at its memory."""
        while self.lines:
            self.last = self.lines.popleft()
            message(f"{self.prefix}{self.last}")
        with contextlib.suppress(psutil.Error):
            self.peak = max(self.peak, self.popen.memory_info().rss)

    def failure(self) -> str | None:
        """Return why it failed once it has ended; None: it did not."""
        self.reader.join(timeout=10)
        self.pass_on()
        code = self.popen.poll()
        if code == 0:
            return None
        if code == -9:
            return "the system killed it, as it does where memory runs out"
        return shortened(self.last.removeprefix("clearhead: "), 300)


def train_all(jobs: Sequence[Job], folder: Path, slots: Sequence[dict[str, str]], total: int) -> dict[str, str]:
    """Train the jobs in order, and return the names of those that failed, each with its reason.

    Args:
        jobs: that are not finished.
        folder: the directory of the sweep.
        slots: the variables of the environment for each of those that may run at once.
        total: how many runs the sweep has.

    Raises:
        SweepInterrupted: a signal came; the runs were stopped and are saved.
    """
    waiting, running, failed = deque(jobs), list[Process](), dict[str, str]()
    before = total - len(jobs)
    with StopSignals() as signals:
        try:
            while waiting or running:
                if signals.received is not None:
                    break
                running = [process for process in running if not _has_ended(process, failed)]
                if waiting and len(running) < len(slots) and _has_room(running):
                    slot = next(slot for slot in range(len(slots)) if slot not in [each.slot for each in running])
                    job = waiting.popleft()
                    message(f"run {before + len(jobs) - len(waiting)} of {total}: {job.name}")
                    prefix = f"{job.name}: " if len(slots) > 1 else ""
                    running.append(Process(job, slot, prefix, {**os.environ, **slots[slot], **SAFE_PATH}))
                time.sleep(POLL_SECONDS)
        finally:
            _stop(running)
        if signals.received is not None:
            finished = total - len(waiting) - len(failed) - len(running)
            raise SweepInterrupted(signals.received, folder, finished, total)
    return failed


def _has_ended(process: Process, failed: dict[str, str]) -> bool:
    process.pass_on()
    if process.popen.poll() is None:
        return False
    reason = process.failure()
    if reason is not None:
        failed[process.job.name] = reason
        message(f"{process.job.name} failed and is skipped: {reason}")
    return True


def _has_room(running: Sequence[Process]) -> bool:
    """Whether memory is left for one run more, as the others show once their steps have begun."""
    largest = max((process.peak for process in running), default=0)
    return all(process.has_begun for process in running) and free_memory() >= MARGIN * largest


def _stop(running: Sequence[Process]) -> None:
    """Let processes finish their step, save and end; what does not end in time is killed."""
    for process in running:
        with contextlib.suppress(psutil.Error):
            process.popen.terminate()
    for process in running:
        try:
            process.popen.wait(timeout=120)
        except psutil.TimeoutExpired:
            process.popen.kill()
        process.pass_on()


def places(runs: Sequence[RunFile], equal: Equal) -> list[dict[str, str]]:
    """Return the variables of the environment for each run that the processors allow at once.

    On a CPU as many as the threads of each (train.threads) leave room for; with several GPUs one on each. At equal
    seconds a run has the machine alone.

    Args:
        runs: the run files.
        equal: what they have in common.
    """
    if equal == "seconds":
        return [{}]
    if choose_device(runs[0].train.device).type == "cuda":
        return _gpus() if runs[0].train.device in ("auto", "cuda") else [{}]
    threads = [run.train.threads for run in runs]
    most = max((number for number in threads if number is not None), default=1)
    return [{}] if None in threads else [{}] * max(1, (os.cpu_count() or 1) // most)


def _gpus() -> list[dict[str, str]]:
    """Return for each GPU the variable of the environment that shows it alone."""
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = named.split(",") if named else map(str, range(count))
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names][:count]
