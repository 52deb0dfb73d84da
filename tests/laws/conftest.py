"""Fixtures: run a test with each attention kernel at any length, and record the threads that call compiled kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from clearhead.core.kernels import attention
from clearhead.fast.stack import StackPlan


@pytest.fixture
def prefer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Prefer one kernel for sequences of any length (a single query is always fused, as in decoding)."""
    return lambda kernel: monkeypatch.setattr(attention, "SHORT_ON_CPU", 0 if kernel == "fused" else 1000)


@pytest.fixture(params=["eager", "fused"])
def kernel(request: pytest.FixtureRequest, prefer: Callable[[str], None]) -> str:
    """Run the test with each kernel."""
    prefer(request.param)
    return request.param


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of thread names that grows with each call of a kernel for a whole stack."""
    threads: list[str] = []
    for name in ("extend", "read"):
        original = getattr(StackPlan, name)

        def count_call(*arguments: Any, original: Callable[..., Any] = original) -> Any:
            threads.append(threading.current_thread().name)
            return original(*arguments)

        monkeypatch.setattr(StackPlan, name, count_call)
    return threads
