"""Random states are restored from a checkpoint on any devices."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from clearhead.training.random_state import (
    environment,
    environment_changes,
    random_state,
    restore_random_state,
    seed_everything,
)


def draws() -> tuple[list[float], float, list[float], float]:
    return torch.randn(5).tolist(), random.random(), np.random.rand(3).tolist(), float(np.random.randn())


def test_every_generator_goes_on_where_it_was() -> None:
    seed_everything(11)
    draws()
    state = json.loads(json.dumps(random_state()))
    expected = draws()
    seed_everything(12)
    restore_random_state(state)
    assert draws() == expected


def test_the_state_of_mps_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [torch.arange(9, dtype=torch.uint8)]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: current[0])
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state: current.append(state))
    state = json.loads(json.dumps(random_state()))
    restore_random_state(state)
    assert torch.equal(current[1], current[0])
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    restore_random_state(state)
    assert random_state()["mps"] is None and len(current) == 2


def test_the_other_kind_of_parallel_training_is_announced_with_as_many_processes() -> None:
    before, now = environment(2), environment(2, is_sharded=True)
    assert "parallel ddp -> fsdp" in (environment_changes(before, now) or "")
    assert environment_changes(before, before) is None
