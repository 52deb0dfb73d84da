"""A `clearhead train` command in a child process, with its messages and its progress.

A sweep trains its runs in such processes. `clearhead check` of a run file kills them to test resumption.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Final

import psutil

from clearhead.base.errors import RunFailure, shorten
from clearhead.base.machine import SAFE_PATH
from clearhead.checkpoints.runs.checkpoint import checkpoint_folder, checkpoint_steps
from clearhead.checkpoints.runs.metrics import FILE_NAME

_POLL_SECONDS: Final = 0.001
_READ_SECONDS: Final = 10.0
"""Maximum seconds until the last messages of an ended process have arrived."""


class TrainProcess:
    """A running `clearhead train`; it resumes from an existing checkpoint, and is killed when its with block ends.

    Args:
        words: the arguments of `clearhead train`.
        run: the run directory.
        environment: variables that are added to the environment. None means none.
        processes: the number of training processes; torchrun starts more than one.
        limit: the seconds after which `wait_until` considers the process stuck.
    """

    def __init__(
        self, words: Sequence[str], run: Path, *, environment: Mapping[str, str] | None = None, processes: int = 1,
        limit: float = math.inf,
    ) -> None:  # fmt: skip
        launcher: list[str] = []
        if processes > 1:
            launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
        resume = ["--resume"] if checkpoint_steps(run) else []
        self.run: Path = run
        self.limit: float = limit
        self.messages: list[str] = []
        """The lines that the process has written to stderr."""
        self._metrics_before: tuple[int, int] = _identity(run / FILE_NAME)
        # In a new session, so that Ctrl-C reaches only the sweep or the check, which then ends the process.
        self.popen: psutil.Popen = psutil.Popen(
            [sys.executable, "-m", *launcher, "clearhead", "train", *words, *resume],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, encoding="utf-8",
            errors="replace", start_new_session=True, env={**os.environ, **(environment or {}), **SAFE_PATH},
        )  # fmt: skip
        self._reader: threading.Thread = threading.Thread(target=self._read, args=(self.popen.stderr,), daemon=True)
        self._reader.start()

    def __enter__(self) -> TrainProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def _read(self, stream: TextIOWrapper) -> None:
        with stream:
            for line in stream:
                self.messages.append(line.rstrip("\n"))

    def has_started(self) -> bool:
        """Return whether the first step has begun: `train` then writes a new metrics file."""
        return _identity(self.run / FILE_NAME) != self._metrics_before

    def has_saved(self, step: int) -> bool:
        """Return whether the checkpoint of a step is complete."""
        return checkpoint_folder(self.run, step).is_dir()

    def wait_until(self, is_reached: Callable[[], bool]) -> bool:
        """Wait until a condition is true, and return whether that happened before the process ended.

        Args:
            is_reached: function that returns whether the condition is true.

        Raises:
            RunFailure: the process failed, or exceeded the limit.
        """
        end = time.monotonic() + self.limit
        while not is_reached():
            code = self.popen.poll()
            if code is not None:
                if code != 0:
                    raise RunFailure(f"clearhead train failed: {self.last_words()}")
                return is_reached()
            if time.monotonic() > end:
                raise RunFailure(f"clearhead train made no progress within {self.limit:.0f} s: {self.last_words()}")
            time.sleep(_POLL_SECONDS)
        return True

    def kill(self) -> None:
        """Kill the process and its children with SIGKILL."""
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = self.popen.children(recursive=True)
        # Kill the parent first: torchrun would restart its children.
        for process in (self.popen, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([self.popen, *children], timeout=60)

    def last_words(self) -> str:
        """Return the last error message of the process, or its last line, shortened."""
        if self.popen.poll() is not None:
            self._reader.join(_READ_SECONDS)
        errors = [line for line in self.messages if line.startswith("clearhead: ")]
        lines = errors or [line for line in self.messages if line.strip()]
        return shorten(lines[-1].removeprefix("clearhead: "), 400) if lines else "it wrote no message"


def _identity(path: Path) -> tuple[int, int]:
    """Return the inode and the modification time of a file; zeros if the file does not exist."""
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns
    return 0, 0
