"""Check of a user's Python file or notebook: a child process imports and compares it, with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import psutil

from clearhead.apps.check.handwritten.report import Report
from clearhead.base.errors import InputError, RunFailure, shorten
from clearhead.base.files import convert_json, explain_absent, parse_json

_FILE = re.compile(r"(?s)(.+\.(?:py|ipynb))(?::([^\W\d]\w*))?")
KINDS = ("rope", "positions", "attention", "norm", "loss", "layer", "transformer", "module")
_CHILD = "clearhead.apps.check.handwritten.child"
_LONGEST_ANSWER: Final = 2**20
_WAITING_ANSWERS: Final = 16
_OUTPUT_KEPT: Final = 2**12
_TICK, _READING_SECONDS, _LOADING_SECONDS = 0.1, 5.0, 600.0
_MAIN: Final = "`if __name__ == '__main__':`"


def python_file(ref: str) -> tuple[Path, str] | None:
    """Split a reference FILE.py[:NAME] or FILE.ipynb[:NAME] into path and name; None for any other text."""
    match = _FILE.fullmatch(ref)
    return None if match is None else (Path(match[1]), match[2] or "")


def compare_file(
    path: Path, name: str, *, kind: str | None, settings: Mapping[str, Any], seconds: float, threads: int = 1
) -> Iterator[Report]:
    """Compare the classes and functions of a user's file with the mathematics; yield each report when it is ready.

    Args:
        path: the file; the child process runs it.
        name: the class or function to compare; empty means all whose name shows their kind.
        kind: the kind of the named class or function; None means that its name decides.
        settings: arguments of the comparison: the width, the heads, and others, such as the mask of `attention`.
        seconds: the time limit, which begins when PyTorch is loaded.
        threads: the number of CPU threads.

    Raises:
        InputError: the file does not exist or cannot be imported, or has no class or function `name`.
        RunFailure: the file does not end in time, ends the process, or writes to the pipe that carries the reports.
    """
    if not path.is_file():
        raise InputError(f"{path}: {'it is no file' if path.exists() else explain_absent(path, 'file')}")
    limit = f"within {seconds:g} seconds (--time-limit)"
    with _Child([str(path), name, kind or "", json.dumps(dict(settings))], threads) as child:
        child.answer(time.monotonic() + _LOADING_SECONDS, path, f"PyTorch was not loaded within {_LOADING_SECONDS:g} s")
        end = time.monotonic() + seconds
        late = f"the import of {path} did not end {limit}; if it trains or reads data, put it below {_MAIN}"
        answer = child.answer(end, path, late)
        if answer.fault is not None:
            raise InputError(f"{path}: {answer.fault}")
        for number, each in enumerate(answer.parts):
            rest = f"; not compared: {', '.join(answer.parts[number + 1 :])}" if answer.parts[number + 1 :] else ""
            report = child.answer(end, path, f"{path}: the comparison of {each} did not end {limit}{rest}").report
            if report is None:
                raise _misuse_failure(path)
            yield report


@dataclass(frozen=True)
class _Answer:
    """Message of the child process: a fault, the names that it will check, or a report."""

    fault: str | None = None
    parts: tuple[str, ...] = ()
    report: Report | None = None


def _misuse_failure(path: Path) -> RunFailure:
    return RunFailure(f"{path} wrote to a pipe of clearhead: write only to file descriptors that your code opens")


class _Child:
    """Running child process that checks a user's file; leaving the with block kills it and what it started.

    Args:
        words: command-line arguments of the child process.
        threads: the number of CPU threads of the child process.
    """

    def __init__(self, words: Sequence[str], threads: int) -> None:
        # Threads that spin while waiting would slow other programs down.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        self.process: psutil.Popen = psutil.Popen(
            [sys.executable, "-P", "-m", _CHILD, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=environment, start_new_session=True,
        )  # fmt: skip
        self.lines: queue.Queue[bytes] = queue.Queue(_WAITING_ANSWERS)
        self.printed: bytes = b""
        self.readers: list[threading.Thread] = [
            threading.Thread(target=self._read_answers, args=(self.process.stdout,), daemon=True),
            threading.Thread(target=self._read_printed, args=(self.process.stderr,), daemon=True),
        ]
        for reader in self.readers:
            reader.start()

    def __enter__(self) -> _Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill the child process and all processes that it started."""
        processes = [self.process]
        with contextlib.suppress(psutil.Error):
            processes += self.process.children(recursive=True)
        with contextlib.suppress(OSError, AttributeError):  # Windows has no process groups
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()

    def _read_answers(self, pipe: BufferedReader) -> None:
        with pipe:
            while line := pipe.readline(_LONGEST_ANSWER):
                self.lines.put(line)
        self.lines.put(b"")

    def _read_printed(self, pipe: BufferedReader) -> None:
        with pipe:
            while chunk := pipe.read1(2**16):
                self.printed = (self.printed + chunk)[-_OUTPUT_KEPT:]

    def answer(self, end: float, path: Path, late: str) -> _Answer:
        """Wait for the next answer of the child and return it.

        Args:
            end: the time limit, as `time.monotonic` counts.
            path: the user's file, for messages.
            late: the message when the time limit has passed.

        Raises:
            RunFailure: the time limit has passed, the process has ended, or the line is no answer of the child.
        """
        line: bytes | None = None
        while line is None:
            with contextlib.suppress(queue.Empty):
                line = self.lines.get(timeout=_TICK)
            if line is None and self.process.poll() is not None:
                # Another process that the file started may keep the pipe open.
                with contextlib.suppress(queue.Empty):
                    line = self.lines.get(timeout=_READING_SECONDS)
                line = line or b""
            elif line is None and time.monotonic() > end:
                raise RunFailure(late)
        if not line:
            raise RunFailure(self._end_message(path))
        try:
            return convert_json(parse_json(line.decode()), _Answer, name="the answer")
        except ValueError:
            raise _misuse_failure(path) from None

    def _end_message(self, path: Path) -> str:
        """Return the error message for a process that ended too early."""
        code = self.process.wait()
        self.readers[1].join(_READING_SECONDS)
        printed = self.printed.decode("utf-8", "replace").strip().splitlines()[-1:]
        last = f": {shorten(printed[0], 200)}" if printed else ""
        return f"{path} ended the process while it was compared, with exit code {code}{last}"
