"""Computations for requests: frequency of their checks, and unchanged results."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from clearhead.apps.serve import work


@pytest.mark.parametrize("keys", [7, 40])
@pytest.mark.parametrize("mask", ["none", "causal", "by key", "by query"])
def test_attention_over_a_long_text_checks_between_queries(
    keys: int, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "LONG_SCORES", 120)
    torch.manual_seed(1)
    queries = keys if mask == "causal" else 33
    query, key, value = torch.randn(2, 4, queries, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)
    shapes = {"by key": (2, 1, 1, keys), "by query": (2, 1, queries, keys)}
    allowed = None
    if mask in shapes:
        allowed = torch.rand(shapes[mask]) < 0.6
        allowed[..., 0] = True
    options = {"is_causal": mask == "causal", "scale": 0.3, "enable_gqa": True}
    expected = F.scaled_dot_product_attention(query, key, value, allowed, **options)
    checks: list[None] = []
    with work._CheckedOperations(lambda: checks.append(None)):
        mixed = F.scaled_dot_product_attention(query, key, value, allowed, **options)
    torch.testing.assert_close(mixed, expected)
    assert len(checks) >= 1 + queries * keys // 120


@pytest.mark.parametrize("last", range(6))
def test_an_ended_computation_restores_the_mode_of_its_thread(last: int) -> None:
    checks = iter(range(100))

    def check() -> None:
        if next(checks) >= last:
            raise work.ClientDisconnected

    assert torch.is_grad_enabled()
    x = torch.ones(2)
    with pytest.raises(work.ClientDisconnected), work._CheckedOperations(check):
        for _ in range(9):
            with torch.no_grad():
                x = x + 1
    assert torch.is_grad_enabled()


def test_time_of_pauses_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "POLLED", 0.01)
    workers = work.Workers()
    slow = work.Work(workers, is_quick=False)
    slow.check()
    assert slow._deadline is not None
    before = slow._deadline
    workers.are_idle.clear()
    pause = workers.are_idle.wait
    monkeypatch.setattr(workers.are_idle, "wait", lambda seconds: pause(0.2) or workers.are_idle.set() or True)
    slow.check()
    assert slow._deadline >= before + 0.2
    slow.end()
    with pytest.raises(work.ClientDisconnected):
        slow.check()
    workers.join()
