"""Matrices in 4 bits: each group of 32 weights in a row has one fp16 scale.

A weight w becomes round(w / scale), from -8 to 7, and is stored as a nibble with 8 added. A group has 16 bytes, like
llama.cpp's Q4_0: low nibbles are its first 16 weights, high nibbles its last 16. The scales are a separate tensor.
So kernels load whole cache lines of nibbles, and the scales of several groups at once.

Legend: N rows, K columns, G groups of all rows, E weights of a group.
"""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.fast import huge_pages
from clearhead.fast.native.abi import fits
from clearhead.fast.native.load import function

GROUP: Final = 32
LOWEST, HIGHEST = -8, 7
_CHUNK: Final = 2**18
"""Number of weights that are searched together, so that their copies stay in the caches."""
_DIVISORS: Final = tuple(step / 8 for step in range(44, 85))
"""Divisors of the search: the largest magnitude of a group divided by each of them or its negative is a scale."""
_REFINEMENTS: Final = 2

Nibbles = UInt8[Tensor, "rows half_columns"]
GroupScales = Float[Tensor, "rows groups"]


def quantize_groups(weight_NK: Float[Tensor, "rows columns"]) -> tuple[Nibbles, GroupScales]:
    """Return a matrix in 4 bits, and the fp16 scale of each group.

    The scale of a group has the smallest squared error of its weights. The search takes scales from a fine grid, and
    moves each to the least-squares solution for its integers.

    Args:
        weight_NK: matrix whose rows are whole groups; on the meta device, the results are there too.

    Raises:
        InputError: a scale is too large for fp16.
    """
    rows, columns = weight_NK.shape
    nibbles = huge_pages.allocate((rows, columns // 2), torch.uint8, weight_NK.device)
    scales = torch.empty(rows, columns // GROUP, dtype=torch.float16, device=weight_NK.device)
    if weight_NK.is_meta:
        return nibbles, scales
    weight_GE = weight_NK.detach().reshape(-1, GROUP)
    step = _CHUNK // GROUP
    for start in range(0, len(weight_GE), step):
        chunk_GE = weight_GE[start : start + step].float()
        # The product is NaN if a weight is not finite.
        scale_G1 = (_find_scales(chunk_GE) + _largest(chunk_GE) * 0.0).half()
        scales.view(-1, 1)[start : start + step] = scale_G1
        _pack(chunk_GE, scale_G1.float(), nibbles.view(-1, GROUP // 2)[start : start + step])
    if torch.isinf(scales).any():
        raise InputError("a weight is too large for 4 bits, whose scales are fp16: use int8")
    return nibbles, scales


def widen_groups(nibbles: Nibbles, scales: GroupScales) -> Float[Tensor, "rows columns"]:
    """Return a 4-bit matrix as fp32."""
    bytes_NGE = nibbles.view(*scales.shape, GROUP // 2)
    widened: Tensor = torch.cat([bytes_NGE & 15, bytes_NGE >> 4], -1).float().add_(LOWEST)
    scaled: Tensor = widened.mul_(scales.float()[..., None]).view(len(nibbles), -1)
    return scaled


def _find_scales(weight_GE: Tensor) -> Tensor:
    """Return the fp32 scale of each group of fp32 weights."""
    divisors = [sign * divisor for divisor in _DIVISORS for sign in (1.0, -1.0)]
    kernel = function("find_group_scales", pointers=3, numbers=3)
    if kernel is not None and fits(weight_GE, torch.float32, *weight_GE.shape):
        scale_G1 = weight_GE.new_empty(len(weight_GE), 1)
        addresses = weight_GE.data_ptr(), (numbers := torch.tensor(divisors)).data_ptr(), scale_G1.data_ptr()
        kernel(*addresses, len(weight_GE), len(numbers), _REFINEMENTS)
        return scale_G1
    largest_G1 = _largest(weight_GE)
    best_G1, scale_G1 = torch.zeros_like(largest_G1), torch.zeros_like(largest_G1)
    for divisor in divisors:
        gain_G1, fitted_G1 = _fit_scale(weight_GE, largest_G1 / divisor)
        is_better = gain_G1 > best_G1
        best_G1 = torch.where(is_better, gain_G1, best_G1)
        scale_G1 = torch.where(is_better, fitted_G1, scale_G1)
    for _ in range(_REFINEMENTS):
        gain_G1, fitted_G1 = _fit_scale(weight_GE, scale_G1)
        scale_G1 = torch.where(gain_G1 > best_G1, fitted_G1, scale_G1)
        best_G1 = torch.maximum(gain_G1, best_G1)
    return scale_G1


def _pack(weight_GE: Tensor, scale_G1: Tensor, nibbles: Tensor) -> None:
    """Write the nibbles of fp32 weights."""
    kernel = function("pack_groups", pointers=3, numbers=1)
    if kernel is not None and fits(weight_GE, torch.float32, *weight_GE.shape):
        kernel(weight_GE.data_ptr(), scale_G1.data_ptr(), nibbles.data_ptr(), len(weight_GE))
        return
    halves = _round_weights(weight_GE, scale_G1).sub_(LOWEST).to(torch.uint8).view(-1, 2, GROUP // 2)
    torch.bitwise_or(halves[:, 0], halves[:, 1] << 4, out=nibbles)


def _largest(weight_GE: Tensor) -> Tensor:
    largest_G1: Tensor = torch.linalg.vector_norm(weight_GE, torch.inf, 1, keepdim=True)
    return largest_G1


def _fit_scale(weight_GE: Tensor, scale_G1: Tensor) -> tuple[Tensor, Tensor]:
    """Return how much integers of this scale reduce a group's squared error, and the best scale for these integers."""
    integers_GE = _round_weights(weight_GE, scale_G1)
    products_G1 = _sum_group(weight_GE * integers_GE)
    fitted_G1 = products_G1 / _sum_group(integers_GE * integers_GE).clamp_(min=1.0)
    return products_G1 * fitted_G1, fitted_G1


def _round_weights(weight_GE: Tensor, scale_G1: Tensor) -> Tensor:
    """Return the integers of the weights of each group; zeros if the scale is zero or not a number."""
    inverse_G1 = (1.0 / scale_G1).nan_to_num_(0.0, 0.0, 0.0)
    return (weight_GE * inverse_G1).round_().clamp_(LOWEST, HIGHEST).nan_to_num_(0.0)


def _sum_group(x_GE: Tensor) -> Tensor:
    """Return the sum of each group, with the same order of additions on every processor."""
    while x_GE.shape[1] > 1:
        half = x_GE.shape[1] // 2
        x_GE = x_GE[:, :half] + x_GE[:, half:]
    return x_GE
