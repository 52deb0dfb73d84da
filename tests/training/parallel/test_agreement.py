"""The engine of several processes: a sharded model if one process has too little memory for the whole training."""

from __future__ import annotations

import pytest
import torch

from clearhead.core import build
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.training.parallel import agreement
from clearhead.training.parallel.processes import Process, Processes
from clearhead.training.preflight import least_memory
from clearhead.training.runfile.read import parse_run_file
from tests.training.runfile.test_read import MINIMAL

MODEL = build_spec(Hyperparameters(layers=1, width=14, heads=2, feedforward=19), source_vocab=23, target_vocab=23)
NEEDED = least_memory(build(MODEL, device="meta"), is_trained_whole=True)


@pytest.mark.parametrize(
    ("parallel", "size", "free", "expected"),
    [
        ("auto", 2, NEEDED, False),
        ("auto", 2, NEEDED - 1, True),
        ("auto", 1, NEEDED - 1, False),
        ("ddp", 2, NEEDED - 1, False),
        ("fsdp", 2, NEEDED, True),
        ("fsdp", 1, NEEDED, False),
    ],
)
def test_a_model_is_shared_where_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, parallel: str, size: int, free: int, expected: bool
) -> None:
    monkeypatch.setattr(agreement, "free_for_each", lambda device, processes_here: free)
    run_file = parse_run_file(MINIMAL, "x.toml", [f"train.parallel={parallel}"])
    processes = Processes(Process(size=size, local_size=size))
    assert agreement.shares_model(run_file, MODEL, torch.device("cpu"), processes) is expected
