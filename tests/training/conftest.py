"""What the tests of training share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clearhead.training.fast_linear import has_products
from tests.processors import WITH_BF16, kernels_of


@pytest.fixture(scope="module", params=WITH_BF16)
def bf16_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernels for processors that multiply bf16; they are compiled here, not while tests are collected."""
    with kernels_of(request.param):
        if not has_products():
            pytest.skip("this processor does not multiply bf16")
        yield
