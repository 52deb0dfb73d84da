"""The models that the site trains once for a build, and that its lessons and its page in the browser share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import clearhead as ch
from clearhead.check import Report

_HERE = Path(__file__).resolve().parent
# In the repository the build of the site; in a copy of the lessons, a folder beside them.
MODELS = _HERE.parents[1] / "build" / "models" if _HERE.parent.name == "docs" else _HERE / "models"


def dates_model() -> ch.Model:
    """Return a translator of dates of many languages: the run of `clearhead demo translate`."""
    run = MODELS / "dates"
    if not (run / "best").exists():
        command = [sys.executable, "-m", "clearhead", "demo", "translate", "--out", str(run)]
        # In a terminal its progress is shown; a page has what the lesson itself says.
        done = subprocess.run(command, check=False, capture_output=not sys.stdout.isatty(), text=True)
        if done.returncode:
            raise RuntimeError(f"the demo could not be trained: {done.stderr}")
    return ch.load(run)


def attempt(check: Callable[[], Report | str], hint: int = 1) -> bool:
    """Print what a check says of an exercise: where it differs, and with a larger hint the mathematics and the mend.

    Args:
        check: compares it, or asserts and returns a word; it may raise `NotImplementedError`.
        hint: 1 to 3, for a report.

    Returns:
        Whether the exercise is solved.
    """
    try:
        found = check()
    except NotImplementedError:
        print("not written yet")
    except AssertionError as error:
        print("not right yet:", error)
    else:
        print(found if isinstance(found, str) else "\n".join(found.lines(hint)))
        return isinstance(found, str) or found.ok
    return False
