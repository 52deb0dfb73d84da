"""Compiled training = eager training, in few graphs, and resumed exactly; in subprocesses without the import hook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.laws.test_compiled import QUICK
from tests.training.parallel.groups import TEXT, Groups, write_data, write_run_file

pytestmark = pytest.mark.slow
BY_LAYER = 3
"""Graphs of an encoder-decoder of two layers each that is compiled by layer: the first of a decoder is another."""


def run_job(folder: Path, *arguments: str) -> str:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1", **QUICK}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_training_is_eager_training_in_one_graph_per_stack(backend: str, tmp_path: Path) -> None:
    report = json.loads(run_job(tmp_path, "tests.laws.compiled_training_job", backend))
    assert len(report) >= 2
    for name, row in report.items():
        stacks = 2 if name.startswith("encoder-decoder") else 1
        assert row["graphs"] <= (BY_LAYER if "by layer" in name else stacks), name
        assert row["loss"] <= 1e-5 and row["gradient"] <= 1e-5, name


def test_processes_train_compiled_layers_as_eager_ones(tmp_path: Path) -> None:
    """One graph serves the equal layers, whether the weights are copied (DDP) or sharded (FSDP)."""
    write_data(tmp_path)
    file = write_run_file(tmp_path, "run", 'kind = "generate"', "decoder", TEXT, "accumulate = 2\nema = 0.9")
    trainings: list[dict[str, Any]] = [{"name": "eager"}]
    for engine in ("ddp", "fsdp"):
        changes = [f"train.parallel={engine}", "train.compile=true"]
        trainings.append({"name": engine, "changes": changes, "is_compiled": True})
    for training in trainings:
        training["changes"] = [f"train.run={tmp_path / training['name']}", *training.get("changes", [])]
        training |= {"file": str(file), "size": 2}
    groups = Groups(tmp_path)
    groups.run(trainings, {"OMP_NUM_THREADS": "1"})
    expected = groups.result("eager")
    for engine in ("ddp", "fsdp"):
        result = groups.result(engine)
        assert result["losses"] == pytest.approx(expected["losses"], rel=2e-5), engine
        assert result["tokens"] == expected["tokens"] and result["graphs"] == 1, engine
        assert groups.result(engine, rank=1)["graphs"] == 1, engine


def test_a_resumed_compiled_run_equals_a_whole_one(tmp_path: Path) -> None:
    """With dropout, and with an empty cache of kernels in the process that resumes."""
    job = "tests.laws.compiled_resume_job"
    first = json.loads(run_job(tmp_path / "cache", job, str(tmp_path), "begin"))
    last = json.loads(run_job(tmp_path / "empty", job, str(tmp_path), "resume"))
    assert first["whole"] == last["resumed"]
    assert first["choice"] is last["choice"] is True
