"""Matrices in 4 bits: groups of 32 weights of a row, each with a scale in fp16.

A weight w becomes round(w / scale), from -8 to 7, and is stored as a nibble that is 8 larger. A group has 16 bytes, as
llama.cpp's Q4_0 has: low nibbles are its first 16 weights, high nibbles its last 16. The scales are a tensor of their
own: kernels then load whole cache lines of nibbles, and the scales of several groups at once.

Legend: N rows, K columns, G groups of all rows, E elements of a group.
"""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from clearhead.base.errors import InputError

GROUP: Final = 32
LOWEST, HIGHEST = -8, 7
_CHUNK: Final = 2**17
"""Weights that are searched together: their copies stay in the caches."""
_DIVISORS: Final = tuple(step / 8 for step in range(44, 85))
"""Scales that are tried: the largest magnitude of the group divided by each of these, and by their negatives."""
_REFINEMENTS: Final = 2

Nibbles = UInt8[Tensor, "rows half_columns"]
GroupScales = Float[Tensor, "rows groups"]


def quantize_groups(weight_NK: Float[Tensor, "rows columns"]) -> tuple[Nibbles, GroupScales]:
    """Return a matrix in 4 bits, and the fp16 scale of each group.

    The scale of a group is the one with the smallest squared error of its weights: of those in a fine grid, each moved
    to the least squares of its integers.

    Args:
        weight_NK: rows of whole groups; on the meta device the results are there, too.

    Raises:
        InputError: a scale is too large for fp16.
    """
    rows, columns = weight_NK.shape
    nibbles = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight_NK.device)
    scales = torch.empty(rows, columns // GROUP, dtype=torch.float16, device=weight_NK.device)
    if weight_NK.is_meta:
        return nibbles, scales
    weight_GE = weight_NK.detach().reshape(-1, GROUP)
    step = _CHUNK // GROUP
    for start in range(0, len(weight_GE), step):
        chunk_GE = weight_GE[start : start + step].float()
        scale_G1 = _find_scales(chunk_GE)
        integers_GE = _round_weights(chunk_GE, scale_G1).sub_(LOWEST).to(torch.uint8)
        halves = integers_GE.view(-1, 2, GROUP // 2)
        nibbles.view(-1, GROUP // 2)[start : start + step] = halves[:, 0] | halves[:, 1] << 4
        scales.view(-1, 1)[start : start + step] = scale_G1
    if torch.isinf(scales).any():
        raise InputError("weights in 4 bits have scales in fp16, and a weight is too large for one; use int8")
    return nibbles, scales


def widen_groups(nibbles: Nibbles, scales: GroupScales) -> Float[Tensor, "rows columns"]:
    """Return a matrix in 4 bits as fp32."""
    bytes_NGE = nibbles.view(*scales.shape, GROUP // 2)
    widened: Tensor = torch.cat([bytes_NGE & 15, bytes_NGE >> 4], -1).float().add_(LOWEST)
    scaled: Tensor = widened.mul_(scales.float()[..., None]).view(len(nibbles), -1)
    return scaled


def _find_scales(weight_GE: Tensor) -> Tensor:
    """Return the fp16 scale of each group."""
    largest_G1 = torch.linalg.vector_norm(weight_GE, torch.inf, 1, keepdim=True)
    best_G1, scale_G1 = torch.zeros_like(largest_G1), torch.zeros_like(largest_G1)
    for divisor in (sign * divisor for divisor in _DIVISORS for sign in (1.0, -1.0)):
        gain_G1, fitted_G1 = _fit_scale(weight_GE, largest_G1 / divisor)
        is_better = gain_G1 > best_G1
        best_G1 = torch.where(is_better, gain_G1, best_G1)
        scale_G1 = torch.where(is_better, fitted_G1, scale_G1)
    for _ in range(_REFINEMENTS):
        gain_G1, fitted_G1 = _fit_scale(weight_GE, scale_G1)
        scale_G1 = torch.where(gain_G1 > best_G1, fitted_G1, scale_G1)
        best_G1 = torch.maximum(gain_G1, best_G1)
    # Not a number where a weight is not finite.
    half_G1: Tensor = (scale_G1 + largest_G1 * 0.0).half()
    return half_G1


def _fit_scale(weight_GE: Tensor, scale_G1: Tensor) -> tuple[Tensor, Tensor]:
    """Return by how much integers of this scale lower the squared error of a group, and the best scale for them."""
    integers_GE = _round_weights(weight_GE, scale_G1)
    products_G1 = _sum_group(weight_GE * integers_GE)
    fitted_G1 = products_G1 / _sum_group(integers_GE * integers_GE).clamp_(min=1.0)
    return products_G1 * fitted_G1, fitted_G1


def _round_weights(weight_GE: Tensor, scale_G1: Tensor) -> Tensor:
    """Return the integers of the weights of each group; zeros for a scale of zero, or one that is not a number."""
    inverse_G1 = (1.0 / scale_G1.float()).nan_to_num_(0.0, 0.0, 0.0)
    return (weight_GE * inverse_G1).round_().clamp_(LOWEST, HIGHEST).nan_to_num_(0.0)


def _sum_group(x_GE: Tensor) -> Tensor:
    """Return the sum of each group, whose additions have one order on every processor."""
    while x_GE.shape[1] > 1:
        half = x_GE.shape[1] // 2
        x_GE = x_GE[:, :half] + x_GE[:, half:]
    return x_GE
