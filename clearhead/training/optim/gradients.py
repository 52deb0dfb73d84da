"""Gradient scaling and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float, *, max_norm: float | None) -> float:
    """Scale all gradients by a factor, and clip their total norm.

    Args:
        parameters: whose gradients to scale; those without a gradient are skipped.
        factor: positive; turns the gradient of a summed loss into that of a mean.
        max_norm: largest total norm, or None for no clipping.

    Returns:
        The total norm after scaling and before clipping; if it is not finite, the gradients are unchanged.

    Source: arXiv 1211.5063, section 3.2 (clipping by the norm).
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm(gradients)
    # Of sharded gradients each process knows a part.
    norm = float(total.full_tensor() if hasattr(total, "full_tensor") else total) * factor
    if not math.isfinite(norm):
        return norm
    if max_norm is not None and norm > max_norm:
        factor *= max_norm / norm
    torch._foreach_mul_(gradients, factor)
    return norm
