"""What the tests of training share."""

from __future__ import annotations

import pytest

from clearhead.training.fast_linear import has_products


@pytest.fixture(scope="session")
def matrix_unit() -> None:
    """Skip where the kernels for a matrix unit cannot run; they are compiled here, not while tests are collected."""
    if not has_products():
        pytest.skip("this processor has no matrix unit, or there is no compiler")
