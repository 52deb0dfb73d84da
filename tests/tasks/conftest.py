"""Fixtures for the training tests of all tasks."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quick(quick_trainings: None) -> None:
    """Leave out the slow parts of a training, which take as long as its steps."""
