"""Child processes that evaluate untrusted input, with limits of processor time and memory."""

from __future__ import annotations

import atexit
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import psutil

from clearhead.base.child_loop import MEGABYTES
from clearhead.base.errors import InputError

# The garbage collector finds nothing during the imports; without it they take a quarter less time.
_START: Final = (
    "import gc, sys; gc.disable(); sys.path += sys.argv[2:]; import child_loop; "
    "answer = __import__(sys.argv[1]).answer; gc.enable(); child_loop.run(answer)"
)
POLL_SECONDS: Final = 0.05
CLOCK: Final = 10
"""Maximum seconds by the clock for each second of processor time, since other programs may use the processor."""


class ChildProcess:
    """A child process that answers one request at a time; it starts with the first request, and again after a kill.

    Args:
        module: the Python file with the function `answer`, which the child calls for each request.
        packages: the names of the packages that the module can import.
    """

    def __init__(self, module: Path, packages: Sequence[str]) -> None:
        self._module, self._packages = module, packages
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._fault = ""
        atexit.register(self._end)

    def ask(
        self, request: Any, subject: str, seconds: float, is_abandoned: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Return the answer to a request.

        Args:
            request: any value that JSON can hold.
            subject: the subject of error messages, such as "the chat template".
            seconds: the processor time after which the child is killed.
            is_abandoned: function that returns True if the answer is no longer needed; the child is then killed.

        Raises:
            InputError: the request has a fault, exceeds the time or the memory, or was abandoned.
        """
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    # -S skips the start files of site-packages, which may import anything.
                    [sys.executable, "-I", "-S", "-c", _START, self._module.stem, *self._paths()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            answer = self._exchange(json.dumps(request).encode() + b"\n", subject, seconds, is_abandoned)
        if "fault" in answer:
            raise InputError(f"{subject} {answer['fault']}")
        return answer

    def _exchange(
        self, request: bytes, subject: str, seconds: float, is_abandoned: Callable[[], bool]
    ) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None, "no pipes to the child"
        self._fault = ""
        done, line = threading.Event(), b""
        watcher = threading.Thread(target=self._watch, args=(process, seconds, done, is_abandoned), daemon=True)
        watcher.start()
        try:
            with contextlib.suppress(OSError):
                process.stdin.write(request)
                process.stdin.flush()
                line = process.stdout.readline()
        finally:
            done.set()
            watcher.join()
            # Also after Ctrl-C: the answer to this request must not be read as the answer to the next one.
            if self._fault or not line.endswith(b"\n"):
                self._end()
        if not line.endswith(b"\n"):
            fault = self._fault or f"needs more than the {MEGABYTES} MB that it may have"
            raise InputError(f"{subject} {fault}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _watch(
        self, process: subprocess.Popen[bytes], seconds: float, done: threading.Event, is_abandoned: Callable[[], bool]
    ) -> None:
        """Kill the child when it exceeds its time, or when the answer is no longer needed."""
        deadline, start = time.monotonic() + CLOCK * seconds, None
        while not done.wait(min(POLL_SECONDS, seconds)):
            used = _processor_seconds(process.pid)
            start = used if start is None else start
            if is_abandoned():
                self._fault = "was given up: the client has disconnected"
            elif used - start >= seconds or time.monotonic() > deadline:
                self._fault = f"took more than {seconds:g} seconds of processor time"
            if self._fault:
                process.kill()
                return

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _paths(self) -> list[str]:
        """Return the folders of the packages, of the module and of the loop, without importing the packages."""
        specs = [find_spec(name) for name in self._packages]
        folders = [Path(spec.origin).parents[1] for spec in specs if spec is not None and spec.origin]
        return [str(folder) for folder in (*folders, self._module.parent, Path(__file__).parent)]


def _processor_seconds(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        return float(sum(psutil.Process(pid).cpu_times()[:2]))
    return 0.0
