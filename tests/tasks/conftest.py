"""What the trainings of all tasks share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quick(quick_trainings: None) -> None:
    """Leave out what takes as long as the steps."""
