"""Settings that make trainings of a few steps fast."""

from __future__ import annotations

import pytest

from clearhead.training import memory, preflight
from clearhead.training.progress.plots import Plotter


def leave_out(patch: pytest.MonkeyPatch) -> None:
    """Draw no plots, and forecast from one batch whose memory is not compared; other tests cover both."""
    patch.setattr(Plotter, "draw", lambda self, rows, **named: None)
    patch.setattr(preflight, "MOST_BATCHES", 1)
    patch.setattr(preflight, "start_peak", memory.peak_memory)
