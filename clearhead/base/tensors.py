"""Relative error between two tensors, used by every check and test of the library."""

from __future__ import annotations

import math

from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return max|a-b| / max|b| in double precision, or max|a-b| if b is zero.

    Args:
        actual: the tensor to compare.
        expected: the correct tensor.

    Returns:
        The error; infinite if the shapes differ or a value is not finite; 0 for empty tensors.
    """
    if actual.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    first, second = actual.detach().double(), expected.detach().double()
    if not (first.isfinite().all() and second.isfinite().all()):
        return math.inf
    largest, difference = float(second.abs().max()), float((first - second).abs().max())
    return difference / largest if largest else difference
