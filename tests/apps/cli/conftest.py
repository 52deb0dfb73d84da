"""Tiny trained runs that the tests of all commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from clearhead.apps.recipes.fit import Fitted
from clearhead.apps.recipes.run_file import Choice, DataPlan, run_file_text
from clearhead.fast.native.load import library
from clearhead.spec.tasks.registry import find
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
    """Give the run directory of a tiny model of one kind; the first who asks waits for its training."""
    library()

    @cache
    def trained_for(kind: str) -> Path:
        return train_task(tmp_path_factory.mktemp(kind), kind)

    return trained_for


@pytest.fixture(autouse=True)
def quick(quick_trainings: None) -> None:
    """Leave out what takes as long as the steps; the training of `trained` has all of it."""


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """`clearhead new` takes the smallest model of a recipe, and trains and measures nothing."""

    def fitted(plan: DataPlan, minutes: float) -> Fitted:
        recipe = find(plan.task).recipe(plan.amount)
        return Fitted(run_file_text(plan, recipe, Choice(recipe.sizes[0], 32, steps=30)), 30, 1.0)

    monkeypatch.setattr("clearhead.apps.recipes.fit.fitted", fitted)
