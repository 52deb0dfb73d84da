"""Trainings of a few steps, without what would take longer than these steps."""

from __future__ import annotations

import pytest

from clearhead.training import dry_run
from clearhead.training.progress.plots import Plotter


def leave_out(patch: pytest.MonkeyPatch) -> None:
    """Draw no plots, and forecast from one batch whose memory is not compared; each has tests of its own."""
    patch.setattr(Plotter, "draw", lambda self, rows, **named: None)
    patch.setattr(dry_run, "MOST_BATCHES", 1)
    patch.setattr(dry_run, "_start_peak", dry_run.peak_memory)
