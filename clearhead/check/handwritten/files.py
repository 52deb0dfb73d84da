"""A user's Python file compared in a child process with a time limit. Nothing else is ever imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from clearhead.check.handwritten.report import Finding, Report
from clearhead.errors import InputError, RunFailure, shortened
from clearhead.files import absent

_FILE = re.compile(r"(?s)(.+\.py)(?::([^\W\d]\w*))?")
KINDS = ("rope", "positions", "attention", "norm", "loss", "layer", "transformer", "module")
_CHILD = "clearhead.check.handwritten.child"


def python_file(ref: str) -> tuple[Path, str] | None:
    """Return file and name of FILE.py or FILE.py:NAME; None: it is something else."""
    found = _FILE.fullmatch(ref)
    return None if found is None else (Path(found[1]), found[2] or "")


def compare_file(path: Path, name: str, *, kind: str | None, width: int, heads: int, seconds: float) -> list[Report]:
    """Compare what is in a user's file with the mathematics.

    Args:
        path: of the file, which is run.
        name: of the class or function; empty: every one whose name says what it is.
        kind: what it is; None: by its name.
        width, heads: of what is built.
        seconds: of the time limit.

    Raises:
        InputError: no such file, or it cannot be imported, or has no such name.
        RunFailure: it does not end in time, or ends the process.
    """
    if not path.is_file():
        raise InputError(f"{path}: {'it is no file' if path.exists() else absent(path, 'file')}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answer.json"
        command = [sys.executable, "-m", _CHILD, str(path), name, kind or "", str(width), str(heads), str(out)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL, check=False)
        except subprocess.TimeoutExpired:
            raise RunFailure(f"{path} did not end within {seconds:g} seconds (--time-limit)") from None
        if not out.exists():
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
            last = f": {shortened(said[0], 200)}" if said else ""
            raise RunFailure(f"{path} ended the process while it was compared, with exit code {done.returncode}{last}")
        answer = json.loads(out.read_text("utf-8"))
    if "fault" in answer:
        raise InputError(f"{path}: {answer['fault']}")
    return [_report(record) for record in answer["reports"]]


def _report(record: dict[str, object]) -> Report:
    fields = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items() if name != "ok"
    }
    found = record["findings"]
    assert isinstance(found, list)
    findings = tuple(Finding(**{**one, "alternatives": tuple(one["alternatives"])}) for one in found)
    return Report(**{**fields, "findings": findings})  # type: ignore[arg-type]
