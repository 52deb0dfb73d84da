"""What happens to gradients between the backward pass and the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float, *, longest: float | None) -> float:
    """Multiply all gradients by a factor, and shorten them together where their norm is too large.

    Args:
        parameters: whose gradients to change; those without one are passed over.
        factor: turns the gradient of a summed loss into that of a mean, positive.
        longest: largest norm afterwards, or None for no limit.

    Returns:
        The norm of all gradients after the factor and before shortening; if it is not finite, nothing was changed.

    Source: arXiv 1211.5063, section 3.2 (clipping by the norm).
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients)) * factor
    if not math.isfinite(norm):
        return norm
    if longest is not None and norm > longest:
        factor *= longest / norm
    torch._foreach_mul_(gradients, factor)
    return norm
