"""Both attention kernels, at any length: short sequences would never use the fused one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clearhead.kernels import attention


@pytest.fixture
def prefer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Prefer one kernel for sequences of any length (a single query is always fused, as in decoding)."""
    return lambda kernel: monkeypatch.setattr(attention, "SHORT_ON_CPU", 0 if kernel == "fused" else 1000)


@pytest.fixture(params=["eager", "fused"])
def kernel(request: pytest.FixtureRequest, prefer: Callable[[str], None]) -> str:
    """Run the test with each kernel."""
    prefer(request.param)
    return request.param
