"""The bound on cached kernels: ours unless the user has one, and a part of the forecast where shapes differ."""

from __future__ import annotations

import os

import pytest
import torch

from clearhead.training import preflight as preflight_file
from clearhead.training.kernel_cache import CAPACITY, KERNEL_BYTES, limit_kernel_cache, most_kernel_bytes
from clearhead.training.preflight import Workload, step_cost
from clearhead.training.settings import TrainSettings
from tests.training.small import NextToken, ShuffledTokens, summed_loss

OURS, OTHER = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"


@pytest.mark.parametrize(("given", "expected"), [(None, CAPACITY), (OURS, 7), (OTHER, 7)])
def test_the_users_bound_comes_first(monkeypatch: pytest.MonkeyPatch, given: str | None, expected: int) -> None:
    for name in (OURS, OTHER):
        monkeypatch.setenv(name, "7")
        if name != given:
            monkeypatch.delenv(name)
    limit_kernel_cache()
    assert (OURS in os.environ) == (given != OTHER)
    device = torch.device("cpu")
    assert most_kernel_bytes(device, "bf16") == expected * KERNEL_BYTES
    assert most_kernel_bytes(device, "fp32") == most_kernel_bytes(torch.device("cuda"), "bf16") == 0


def test_batches_of_several_shapes_fill_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    full = 3_000_000_000
    monkeypatch.setattr(preflight_file, "most_kernel_bytes", lambda device, precision: full)

    def memory(num_batches: int) -> int:
        module, batches = NextToken(), ShuffledTokens(num_batches=num_batches)
        optimizer = torch.optim.AdamW(module.parameters())
        return step_cost(module, optimizer, Workload(summed_loss, batches), TrainSettings(run="run")).memory_bytes

    assert memory(1) < full // 10 < full <= memory(5) < full * 1.1
