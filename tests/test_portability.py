"""The package runs without the modules of POSIX systems, and as `python -m clearhead`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import portability_job


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=300)


def test_everything_works_without_posix_modules(tmp_path: Path) -> None:
    done = run("-m", "tests.portability_job", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-2]) > 200


@pytest.mark.parametrize("name", portability_job.HIDDEN)
def test_the_job_can_fail(name: str) -> None:
    with pytest.raises(ImportError, match=f"clearhead.core.example imports {name}, which exists on POSIX"):
        portability_job.import_for_others(name, {"__name__": "clearhead.core.example"})
    portability_job.import_for_others("json", {"__name__": "clearhead.core.example"})


def test_the_package_runs_as_a_module() -> None:
    done = run("-m", "clearhead", "--help")
    assert done.returncode == 0 and "clearhead train" in done.stdout
