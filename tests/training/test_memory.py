"""The limit of cached kernels, which users can override, and the forecast of memory for kernels of all sizes."""

from __future__ import annotations

import gc
import os
import platform

import psutil
import pytest
import torch
from torch import Tensor, nn

from clearhead.base.machine import give_memory_back
from clearhead.fast.training import tree as tree_module
from clearhead.training import memory, preflight
from clearhead.training.memory import (
    CAPACITY,
    STEPS_BETWEEN,
    TORCH_CAPACITY,
    limit_kernel_cache,
    needs_kernels,
    return_memory,
)
from clearhead.training.preflight import Trial, Workload, measure_step_cost
from clearhead.training.record import TrainSettings
from tests.training.small import NextToken, ShuffledTokens, Tokens, sum_loss

OURS, OTHER = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"
TORCH = "LRU_CACHE_CAPACITY"


@pytest.mark.parametrize("limit", [None, OURS, OTHER, TORCH])
def test_the_users_bound_comes_first(monkeypatch: pytest.MonkeyPatch, limit: str | None) -> None:
    for name in (OURS, OTHER, TORCH):
        monkeypatch.setenv(name, "7")
        if name != limit:
            monkeypatch.delenv(name)
    limit_kernel_cache()
    assert os.environ.get(OURS) == {OURS: "7", OTHER: None}.get(str(limit), str(CAPACITY))
    assert os.environ[TORCH] == ("7" if limit == TORCH else str(TORCH_CAPACITY))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_holes_in_memory_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "has_faster_products", lambda: False)
    blocks = [bytes(1500) for _ in range(80_000)]
    last = blocks[-1]
    blocks.clear()
    held = psutil.Process().memory_info().rss
    return_memory(STEPS_BETWEEN + 1, torch.device("cpu"), "bf16")
    return_memory(STEPS_BETWEEN, torch.device("cpu"), "fp32")
    assert psutil.Process().memory_info().rss > held - 20e6
    return_memory(STEPS_BETWEEN, torch.device("cpu"), "bf16")
    assert psutil.Process().memory_info().rss < held - 60e6 and last


@pytest.mark.parametrize("is_by_onednn", [True, False])
def test_kernels_are_needed_for_products_of_onednn_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, is_by_onednn: bool
) -> None:
    monkeypatch.setattr(memory, "has_faster_products", lambda: is_by_onednn)
    assert needs_kernels(torch.device("cpu"), "bf16")
    assert needs_kernels(torch.device("cpu"), "fp32") == is_by_onednn
    assert not needs_kernels(torch.device("cuda"), "bf16") and not needs_kernels(torch.device("cuda"), "fp32")


@pytest.mark.parametrize("is_needed", [True, False])
def test_sizes_that_were_not_tried_count_as_those_that_were(monkeypatch: pytest.MonkeyPatch, is_needed: bool) -> None:
    """Each size takes 40 MB: at least 4 of 41 sizes are measured, although time is up after the first pass.

    An array of this size is never placed in memory that other tests have freed.
    """
    arrays: dict[torch.Size, Tensor] = {}

    def keeping(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        if batch.ids_BT.shape not in arrays:
            arrays[batch.ids_BT.shape] = torch.ones(10_000_000)
        return sum_loss(module, batch)

    monkeypatch.setattr(preflight, "needs_kernels", lambda device, precision: is_needed)
    monkeypatch.setattr(tree_module, "has_faster_products", lambda: False)  # whose own kernels take memory
    module = NextToken()
    optimizer = torch.optim.AdamW(module.parameters())
    # Memory of earlier tests that is freed during the measurement would hide a part of the arrays.
    gc.collect()
    give_memory_back()
    work = Workload(keeping, ShuffledTokens(), num_sizes=41)
    cost = measure_step_cost(Trial(module, optimizer, work, TrainSettings(run="run", steps=10**6)), seconds=0.0)
    if is_needed:
        assert len(arrays) >= 4 and 1400e6 < cost.memory_bytes < 2000e6
    else:
        assert len(arrays) <= 2 and cost.memory_bytes < 200e6
