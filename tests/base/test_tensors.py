"""Relative error of two tensors, with edge cases."""

from __future__ import annotations

import math

import pytest
import torch

from clearhead.base.tensors import relative_error


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, -3.0], [1.0, -4.0], 0.25),
        ([0.5, 0.0], [0.0, 0.0], 0.5),
        ([], [], 0.0),
        ([1.0], [1.0, 1.0], math.inf),
        ([math.nan], [1.0], math.inf),
        ([1.0], [math.inf], math.inf),
        ([3], [4], 0.25),
    ],
)
def test_the_relative_error(actual: list[float], expected: list[float], error: float) -> None:
    assert relative_error(torch.tensor(actual), torch.tensor(expected)) == error


def test_the_error_is_computed_in_double_precision() -> None:
    """In bf16, the difference of two numbers would be rounded to a power of two."""
    actual, expected = torch.tensor([257.0, 3.0]).bfloat16(), torch.tensor([256.0, 2.9]).bfloat16()
    assert relative_error(actual, expected) == float(3.0 - expected[1].double()) / 256.0
