"""What the trainings of all tasks share."""

from __future__ import annotations

import pytest

from clearhead.training.progress.plots import Plotter


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the plots out, which take as long as the steps; their own tests, the loop's and the demos' draw them."""
    monkeypatch.setattr(Plotter, "draw", lambda self, rows, **named: None)
