"""A tiny trained run that the tests of all commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from clearhead.cli.main import main
from tests.cli.tiny_run import write_run_file


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps; the run itself is its subfolder `run`."""
    folder = tmp_path_factory.mktemp("trained")
    assert main(["train", str(write_run_file(folder))]) == 0
    return folder
