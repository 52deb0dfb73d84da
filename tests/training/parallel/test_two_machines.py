"""Two torchrun agents on this machine: killed on either side, a run resumes and ends with the same bits."""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest

from clearhead.checkpoints.runs.checkpoint import checkpoint_steps
from tests.house.source import ROOT
from tests.training.parallel.groups import TEXT, Groups, write_data, write_run_file

pytestmark = pytest.mark.slow
STEPS = 30


def load_two_machines() -> ModuleType:
    spec = importlib.util.spec_from_file_location("two_machines", ROOT / "benchmarks" / "two_machines.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["two_machines"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the system knows no SIGKILL")
def test_killed_on_either_machine_a_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """One job with kills before the first checkpoint, in a step and during a save; benchmarks/sigkill.py has all."""
    machines = load_two_machines()
    boxes = [tmp_path / "first", tmp_path / "second"]
    write_data(tmp_path)
    for box in boxes:
        box.mkdir()
        write_data(box)
    file = write_run_file(tmp_path, "whole", 'kind = "generate"', "decoder", TEXT, "save_every = 3\nema = 0.9")
    changes = ["model.dropout=0.1", f"train.steps={STEPS}", "train.validate_every=100"]
    Groups(tmp_path).run([{"name": "whole", "file": str(file), "size": 2, "changes": changes}])
    run = tmp_path / "run"
    words = ["train", str(file), f"train.run={run}", *changes]
    with machines.TwoMachines(boxes, words, restarts=3) as pair:
        pair.kill(1, "before", run)
        pair.kill(0, "step", run)
        pair.kill(1, "save", run)
        assert pair.wait() == [0, 0], pair.read_errors()
    assert not machines.differing_states(tmp_path / "whole" / "run", run, STEPS)
    assert checkpoint_steps(run)[-1] == STEPS and not list(run.rglob(".*"))
    assert "".join(pair.read_errors()).count("continuing after step") == 2, pair.read_errors()
