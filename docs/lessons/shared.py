"""What the lessons share: models that are trained once, lines of the core, and exercises that check themselves."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clearhead as ch

_HERE = Path(__file__).resolve().parent
# In the repository the site's build; in a copy of the lessons, beside them.
MODELS = _HERE.parents[1] / "build" / "models" if _HERE.parent.name == "docs" else _HERE / "models"


def dates_model() -> ch.Model:
    """Return a translator of dates of many languages: the run of `clearhead demo translate`."""
    return ch.load(dates_run(), device="cpu")


def dates_run() -> Path:
    """Return the run directory of that translator, which is trained (about a minute) where there is none."""
    run = MODELS / "dates"
    if not (run / "best").exists():
        command = [sys.executable, "-m", "clearhead", "demo", "translate", "--out", str(run)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return run


def core_lines(module: str, name: str) -> None:
    """Print the installed lines of a function, or of a method such as `Step.forward`."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    print(inspect.getsource(found))


def exercise(check: Callable[[], Any], hint: int = 1) -> None:
    """Try an answer, and print what is wrong with it; never raise.

    Args:
        check: asserts, with an explanation; or returns a report of `ch.check`.
        hint: how much a report tells: 1 where, 2 the line of mathematics, 3 the mistake and its mend.
    """
    _, text = _tried(check, hint)
    print(text)


def solved(check: Callable[[], Any]) -> None:
    """Assert that a solution is right."""
    ok, text = _tried(check, 3)
    assert ok, text
    print("the solution passes")


def wrong(check: Callable[[], Any], help_text: str) -> None:
    """Assert that a wrong answer is refused, with words that help."""
    ok, text = _tried(check, 3)
    assert not ok and help_text in text, text
    print("a wrong answer reads:\n" + text)


def _tried(check: Callable[[], Any], hint: int) -> tuple[bool, str]:
    try:
        report = check()
    except NotImplementedError:
        return False, "not written yet: replace `raise NotImplementedError` by your answer, and run the cell again"
    except AssertionError as error:
        return False, f"not yet: {error}"
    except Exception as error:  # noqa: BLE001 - a learner's own code may fail in any way
        return False, f"your code stopped with {type(error).__name__}: {error}"
    if report is None:
        return True, "right"
    return report.ok, "\n".join(report.lines(hint))
