"""Compiled = eager, watched or not, in a subprocess: the import hook of the tests and `torch.compile` do not mix."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT

# One file in C++ for each graph, of plain loops that are not optimized: fifty files of vector code take minutes.
QUICK = {"TORCHINDUCTOR_CPP_WRAPPER": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_DEBUG_COMPILE": "1"}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the JSON report of `compiled_job.py`."""
    assert shutil.which("g++"), "compiled steps need g++: .ci/run installs it"
    folder = tmp_path_factory.mktemp("inductor")
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1", **QUICK}
    done = subprocess.run(
        [sys.executable, "-m", "tests.laws.compiled_job"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def test_compiled_is_eager(report: dict[str, Any]) -> None:
    assert report["difference"] <= 1e-5


@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_compiled_is_eager_for_one_stack(report: dict[str, Any], family: str) -> None:
    assert report["by_family"][family] <= 1e-5


def test_hook_points_change_no_graph(report: dict[str, Any]) -> None:
    assert report["is_same"]


def test_watched_steps_run_uncompiled_and_say_so(report: dict[str, Any]) -> None:
    assert report["warnings"] == ["torch.compile is off while activations are captured or edited"] * 2
    assert report["num_captured"] == 3
    assert report["captured"] <= 1e-5 and report["edited"] <= 1e-5


def test_the_compiled_graph_is_used_again(report: dict[str, Any]) -> None:
    assert report["graphs"] == [1, 1, 1]
    assert report["after"] == 0.0
