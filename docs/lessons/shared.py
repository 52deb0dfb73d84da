"""The models that the site trains once for a build, and that its lessons and its page in the browser share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import clearhead as ch

MODELS = Path(__file__).resolve().parents[2] / "build" / "models"


def dates_model() -> ch.Model:
    """Return a translator of dates of many languages: the run of `clearhead demo translate`."""
    run = MODELS / "dates"
    if not (run / "best").exists():
        command = [sys.executable, "-m", "clearhead", "demo", "translate", "--out", str(run)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return ch.load(run)
