"""Tiny trained runs that the tests of all commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from clearhead.cli.main import main
from tests.cli.tiny_run import write_run_file
from tests.cli.tiny_tasks import train_task


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps; the run itself is its subfolder `run`."""
    folder = tmp_path_factory.mktemp("trained")
    assert main(["train", str(write_run_file(folder))]) == 0
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give the run directory of a tiny model of one kind; the first who asks waits for its training."""

    @cache
    def trained_for(kind: str) -> Path:
        return train_task(tmp_path_factory.mktemp(kind), kind)

    return trained_for
