"""A `clearhead train` command in a process of its own, which can be killed at a chosen moment."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from clearhead.base.errors import RunFailure, shortened
from clearhead.base.machine import SAFE_PATH
from clearhead.checkpoints.runs.checkpoint import checkpoint_folder, checkpoint_steps
from clearhead.checkpoints.runs.metrics import FILE_NAME, read_metrics
from clearhead.core.extensions.files import parts_options

_POLL_SECONDS: Final = 0.001
_WRITING: Final = re.compile(r"\.step-([0-9]+)\.writing-([0-9]+)-.*")
_VALIDATING: Final = re.compile(r"^step ([0-9]+)  validating$", re.MULTILINE)


@dataclass(frozen=True)
class TrainProcess:
    """A running `clearhead train`; whoever watches it sees its run directory and what it says.

    Attributes:
        process: the command, or torchrun that started several.
        run: the run directory.
        said: the file of its messages.
        metrics_before: what told the metrics apart from those of before, when the process started.
        limit: seconds after which it is taken for stuck.
    """

    process: psutil.Popen
    run: Path
    said: Path
    metrics_before: tuple[int, int]
    limit: float

    def until(self, is_reached: Callable[[], bool]) -> bool:
        """Wait for a moment, and return whether it came; it does not if the process ends before.

        Raises:
            RunFailure: the process failed, or is stuck.
        """
        end = time.monotonic() + self.limit
        while not is_reached():
            code = self.process.poll()
            if code is not None:
                if code != 0:
                    raise RunFailure(f"clearhead train failed: {self.last_words()}")
                return is_reached()
            if time.monotonic() > end:
                raise RunFailure(f"clearhead train did not go on within {self.limit:.0f} s: {self.last_words()}")
            time.sleep(_POLL_SECONDS)
        return True

    def killed_inside(self, is_inside: Callable[[], bool]) -> bool:
        """Kill the process if it is still at a moment once it was held, and return whether it was."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.suspend()
            if is_inside():
                self.kill()
                return True
            self.process.resume()
        return False

    def kill(self) -> None:
        """Kill the process and those that it started, with SIGKILL."""
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = self.process.children(recursive=True)
        # The first one first: torchrun would start the others anew.
        for process in (self.process, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([self.process, *children], timeout=60)

    def last_words(self) -> str:
        """Return the last line that it said, shortened."""
        lines = self._messages().split("\n")
        spoken = [line for line in lines if line.startswith("clearhead: ")] or [line for line in lines if line.strip()]
        return shortened(spoken[-1].removeprefix("clearhead: "), 400) if spoken else "it said nothing"

    def _messages(self) -> str:
        return self.said.read_text(encoding="utf-8", errors="replace")

    # Moments

    def has_saved(self, step: int) -> bool:
        """Whether the checkpoint of a step is complete."""
        return checkpoint_folder(self.run, step).is_dir()

    def has_started(self) -> bool:
        """Whether its steps have begun: a new run and a resumed one write the metrics anew just before."""
        return _identity(self.run / FILE_NAME) != self.metrics_before

    def is_saving(self, step: int) -> bool:
        """Whether it writes the checkpoint of a step, or of a later one."""
        with contextlib.suppress(OSError):
            found = (_WRITING.fullmatch(path.name) for path in (self.run / "checkpoints").iterdir())
            # What another process left lies there until this one has started.
            return any(one and int(one[1]) >= step and int(one[2]) == self.process.pid for one in found)
        return False

    def is_validating(self, step: int) -> bool:
        """Whether it validates a step, or a later one."""
        steps = _VALIDATING.findall(self._messages())
        if not steps or int(steps[-1]) < step:
            return False
        return not any(row.step == int(steps[-1]) for row in read_metrics(self.run / FILE_NAME)[-1:])


@contextlib.contextmanager
def training(
    file: Path, run: Path, overrides: Sequence[str], *, limit: float, processes: int = 1
) -> Iterator[TrainProcess]:
    """Start `clearhead train`, with --resume where there is a checkpoint; it is killed at the end of the with block.

    Args:
        file: the run file.
        run: the run directory.
        overrides: `table.key=value` texts.
        limit: as of `TrainProcess`.
        processes: of the training; several are started by torchrun.
    """
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"] if processes > 1 else []
    resume = ["--resume"] if checkpoint_steps(run) else []
    command = [sys.executable, "-m", *launcher, "clearhead", "train", *parts_options(), str(file),
               f"train.run={run}", *overrides]  # fmt: skip
    said, before = run.with_name(f"{run.name}.messages"), _identity(run / FILE_NAME)
    with said.open("wb") as messages:
        # A group of its own: Ctrl-C is for the check, which ends it.
        process = psutil.Popen(
            [*command, *resume], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=messages,
            start_new_session=True, env={**os.environ, **SAFE_PATH},
        )  # fmt: skip
    started = TrainProcess(process, run, said, before, limit)
    try:
        yield started
    finally:
        started.kill()


def _identity(path: Path) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns
    return 0, 0
