"""Source files that five typical calls on a tiny model ("walks") run through, each call in a separate process.

    python -m tests.house.walks            print the files of every walk
    python -m tests.house.walks record     write their numbers to tests/house/walks.json

A file counts if one of its functions runs, in any thread, between the start and the end of the call. Imports do not
count, nor do functions and comprehensions that run because a file is imported. Files of `base/`, `spec/` and `core/` do
not count either: every walk may use them.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "clearhead"
RECORD = Path(__file__).with_suffix(".json")
WALKS = ("load", "translate", "generate", "train", "serve")
NOT_COUNTED = (
    "__init__.py", "base/", "core/", "fast/busy_waiting.py", "spec/", "version.py",
)  # fmt: skip
"""Files and folders of `base/`, `spec/` and `core/`; and the file of a thread that watches the load of the machine."""


class FileTrace:
    """The names of the package's files in which a function runs while the trace is active."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._is_active = False
        self._names: dict[CodeType, str | None] = {}

    def install(self) -> None:
        """Observe this thread and every thread that starts from now on."""
        threading.setprofile(self._observe)
        sys.setprofile(self._observe)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Return a context manager in which files are counted."""
        self._is_active = True
        try:
            yield
        finally:
            self._is_active = False

    def stop(self) -> None:
        """Stop counting."""
        self._is_active = False

    def _observe(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not self._is_active:
            return
        code = frame.f_code
        if code not in self._names:
            self._names[code] = file_if_counted(code)
        name = self._names[code]
        if name is not None and name not in self.files and not is_import(frame):
            self.files.add(name)


def file_if_counted(code: CodeType) -> str | None:
    """Return the path of a function's file inside the package, or None if the file does not count."""
    is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
    path = Path(code.co_filename)
    if not is_function or not path.is_relative_to(PACKAGE):
        return None
    name = path.relative_to(PACKAGE).as_posix()
    return None if name.startswith(NOT_COUNTED) else name


def is_import(frame: FrameType) -> bool:
    """Return whether a function runs because a file of the package is imported."""
    caller = frame.f_back
    while caller is not None:
        if caller.f_code.co_name == "<module>" and Path(caller.f_code.co_filename).is_relative_to(PACKAGE):
            return True
        caller = caller.f_back
    return False


def make_models(folder: Path) -> None:
    """Train the two tiny models that the walks use, and write the run file of the third walk."""
    from tests.apps.cli.tiny_run import train, write_run_file
    from tests.apps.cli.tiny_tasks import train_task

    for name in ("translate", "generate", "train"):
        (folder / name).mkdir()
    train(write_run_file(folder / "translate"))
    train_task(folder / "generate", "generate")
    write_run_file(folder / "train")


def walk_load(folder: Path, trace: FileTrace) -> None:
    """Load a checkpoint by its reference."""
    import clearhead as ch

    with trace.active():
        ch.load(f"{folder}/translate/run@best")


def walk_translate(folder: Path, trace: FileTrace) -> None:
    """Translate one text."""
    import clearhead as ch

    model = ch.load(f"{folder}/translate/run@best")
    with trace.active():
        model.translate("a m u")


def walk_generate(folder: Path, trace: FileTrace) -> None:
    """Continue one prompt by a few tokens."""
    import clearhead as ch

    model = ch.load(f"{folder}/generate/run@best")
    with trace.active():
        model.generate("a m", max_new_tokens=5)


def walk_train(folder: Path, trace: FileTrace) -> None:
    """Train from a run file; counts until the end of the first step that has a learning rate."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    import clearhead as ch

    def stop_after_first_step(optimizer: Any, *_: Any) -> None:
        # The forecast tries the optimizer with a learning rate of zero.
        if any(float(group["lr"]) > 0 for group in optimizer.param_groups):
            trace.stop()

    register_optimizer_step_post_hook(stop_after_first_step)
    with trace.active():
        ch.train(folder / "train" / "run.toml")


def walk_serve(folder: Path, trace: FileTrace) -> None:
    """Send one request to a server; counts from the request to its answer."""
    from clearhead.apps.cli.main import main

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    threading.Thread(target=_request_completion, args=(port, trace), daemon=True).start()
    main(["serve", f"{folder}/generate/run", "--port", str(port)])


def _request_completion(port: int, trace: FileTrace) -> None:
    """Wait for the server, send one completion while the trace is active, and end the server."""
    address = f"http://127.0.0.1:{port}"
    for _ in range(600):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            break
        time.sleep(0.1)
    body = json.dumps({"model": "run", "prompt": "a m", "max_tokens": 5}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, headers={"Content-Type": "application/json"})
    with trace.active(), urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["choices"]
    os.kill(os.getpid(), signal.SIGTERM)


CALLS: Mapping[str, Callable[[Path, FileTrace], None]] = {
    "load": walk_load,
    "translate": walk_translate,
    "generate": walk_generate,
    "train": walk_train,
    "serve": walk_serve,
}


def files_of_walks() -> dict[str, list[str]]:
    """Return the files of every walk, each traced in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        return {name: _trace_walk(name, folder) for name in WALKS}


def _trace_walk(name: str, folder: str) -> list[str]:
    """Trace one walk in a child process and return its files."""
    command = [sys.executable, "-m", "tests.house.walks", name, folder]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{name}: {ended.stderr[-2000:]}"
    files: list[str] = json.loads(ended.stdout.splitlines()[-1])
    return files


def main() -> None:
    """Print or record the files of all walks; with two arguments, trace one walk and print its files as JSON."""
    arguments = sys.argv[1:]
    if len(arguments) == 2:
        trace = FileTrace()
        trace.install()
        name, folder = arguments
        with contextlib.redirect_stdout(sys.stderr):
            CALLS[name](Path(folder), trace)
        print(json.dumps(sorted(trace.files)))
        return
    walks = files_of_walks()
    for name, files in walks.items():
        print(f"{name}: {len(files)} files\n  " + "\n  ".join(files))
    if arguments == ["record"]:
        RECORD.write_text(json.dumps({name: len(files) for name, files in walks.items()}, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
