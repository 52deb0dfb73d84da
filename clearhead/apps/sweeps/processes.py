"""The runs of a sweep as processes: one after the other, or several at once where processors and memory allow it."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any, Final

import psutil
import torch

from clearhead.apps.sweeps.variations import Equal
from clearhead.apps.train_process import TrainProcess
from clearhead.base.machine import choose_device, free_memory
from clearhead.base.progress import message
from clearhead.base.signals import Interrupted, StopSignals
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
class RunningJob:
    """A job that is training; its messages are passed on.

    Attributes:
        job: the job.
        slot: the index of its environment among those of the jobs that run at once.
        prefix: the beginning of each line that is passed on.
        process: the training process.
        peak: the largest memory that the process was seen to hold, in bytes.
        num_passed: the number of messages that were passed on.
    """

    job: Job
    slot: int
    prefix: str
    process: TrainProcess
    peak: int = 0
    num_passed: int = 0

    def watch(self) -> None:
        """Pass on the new messages of the process, and measure its memory."""
        for line in self.process.messages[self.num_passed :]:
            message(f"{self.prefix}{line}")
            self.num_passed += 1
        with contextlib.suppress(psutil.Error):
            self.peak = max(self.peak, self.process.popen.memory_info().rss)

    def find_failure(self) -> str | None:
        """Return why the process failed; None if it did not."""
        reason = self.process.last_words()
        self.watch()
        code = self.process.popen.poll()
        if code == 0:
            return None
        return "the system killed it, as it does where memory runs out" if code == -9 else reason


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
    waiting, running, failed = deque(jobs), list[RunningJob](), dict[str, str]()
    before = total - len(jobs)
    with StopSignals() as signals:
        try:
            while waiting or running:
                if signals.received is not None:
                    break
                running = [each for each in running if not _has_ended(each, failed)]
                if waiting and len(running) < len(slots) and _has_room(running):
                    slot = next(slot for slot in range(len(slots)) if slot not in [each.slot for each in running])
                    job = waiting.popleft()
                    message(f"run {before + len(jobs) - len(waiting)} of {total}: {job.name}")
                    prefix = f"{job.name}: " if len(slots) > 1 else ""
                    process = TrainProcess(job.words, job.run, environment=slots[slot])
                    running.append(RunningJob(job, slot, prefix, process))
                time.sleep(POLL_SECONDS)
        finally:
            _stop(running)
        if signals.received is not None:
            finished = total - len(waiting) - len(failed) - len(running)
            raise SweepInterrupted(signals.received, folder, finished, total)
    return failed


def _has_ended(running: RunningJob, failed: dict[str, str]) -> bool:
    running.watch()
    if running.process.popen.poll() is None:
        return False
    reason = running.find_failure()
    if reason is not None:
        failed[running.job.name] = reason
        message(f"{running.job.name} failed and is skipped: {reason}")
    return True


def _has_room(running: Sequence[RunningJob]) -> bool:
    """Return whether memory is left for one more run; the others show their need once their steps have begun."""
    largest = max((each.peak for each in running), default=0)
    return all(each.process.has_started() for each in running) and free_memory() >= MARGIN * largest


def _stop(running: Sequence[RunningJob]) -> None:
    """Let processes finish their step, save and end; a process that does not end in time is killed."""
    for each in running:
        with contextlib.suppress(psutil.Error):
            each.process.popen.terminate()
    for each in running:
        try:
            each.process.popen.wait(timeout=120)
        except psutil.TimeoutExpired:
            each.process.popen.kill()
        each.watch()


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
