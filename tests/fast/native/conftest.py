"""What the tests of the kernels share."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from tests.processors import LEVELS, kernels_of


@pytest.fixture(scope="module", params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    """The kernels for one level, in place of those for this processor."""
    with kernels_of(request.param) as library:
        yield library
