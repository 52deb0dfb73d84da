"""Compiled = eager, in a subprocess: the import hook of the tests and `torch.compile` do not mix."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_compiled_is_eager(tmp_path: Path) -> None:
    assert shutil.which("g++"), "compiled steps need g++: .ci/run installs it"
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.laws.compiled_job"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) <= 1e-5
