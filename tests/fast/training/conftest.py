"""Fixtures for the tests of training kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clearhead.fast.probe import processor
from clearhead.fast.training.linear import has_products
from tests.processors import WITH_BF16, kernels_of


@pytest.fixture(scope="module", params=WITH_BF16)
def bf16_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernels for processors that multiply bf16; compiled here, not during the collection of tests."""
    if "avx512_bf16" not in processor().isa:
        pytest.skip("this processor has no AVX-512 for bf16")
    with kernels_of(request.param):
        assert has_products()
        yield
