"""Tiny trained runs that the tests of all commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from clearhead.apps.recipes.fit import FittedRunFile
from clearhead.apps.recipes.run_file import DataPlan, RunFileChoice, run_file_text
from clearhead.fast.native.load import library
from clearhead.spec.tasks.registry import find_task
from tests.apps.cli.tiny_run import train, write_run_file
from tests.apps.cli.tiny_tasks import train_task


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps; the run itself is its subfolder `run`."""
    # What compiles the kernels says so, and no test of a command's messages is to be the one.
    library()
    folder = tmp_path_factory.mktemp("trained")
    train(write_run_file(folder))
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains a tiny model of one kind once, and returns its run directory."""
    library()

    @cache
    def train_once(kind: str) -> Path:
        return train_task(tmp_path_factory.mktemp(kind), kind)

    return train_once


@pytest.fixture(autouse=True)
def quick(quick_trainings: None) -> None:
    """Leave out slow parts of trainings; only the training of `trained` has all parts."""


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `clearhead new` take the smallest model of a recipe, without training and measuring."""

    def fit_smallest(plan: DataPlan, minutes: float) -> FittedRunFile:
        recipe = find_task(plan.task).recipe(plan.amount)
        return FittedRunFile(run_file_text(plan, recipe, RunFileChoice(recipe.sizes[0], 32, steps=30)), 30, 1.0)

    monkeypatch.setattr("clearhead.apps.recipes.fit.fit_run_file", fit_smallest)
