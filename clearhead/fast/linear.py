"""Linear layers computed by the compiled kernels, or by PyTorch without them.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.fast.native.abi import fits
from clearhead.fast.native.load import function
from clearhead.fast.nibbles import GROUP, GroupScales, Nibbles, widen_groups
from clearhead.fast.probe import has_exact_int_mm
from clearhead.fast.stored import LARGEST

Rows = Float[Tensor, "*axes inputs"]
Outputs = Float[Tensor, "*axes outputs"]
LinearFunction = Callable[[Tensor], Tensor]

MOST_BF16_ROWS: Final = 256
"""Above this number of rows, the products of PyTorch are at least as fast."""
LEAST_BYTES: Final = 2**18
"""Matrices with fewer bytes stay in the caches; PyTorch multiplies them faster in fp32 than in 8 bits."""


class ServedLinear(nn.Module):
    """Linear layer of a replica whose products are computed by kernels."""

    product: LinearFunction

    def forward(self, x: Tensor) -> Tensor:
        """Return x weight^T + bias."""
        return self.product(x)


def float_linear(
    weight_NK: Float[Tensor, "outputs inputs"], bias_N: Float[Tensor, " outputs"] | None
) -> LinearFunction | None:
    """Return a function that computes x weight^T + bias like `F.linear`, up to the order of sums.

    Args:
        weight_NK: fp32 or bf16 weights on the CPU, row by row. Their memory must not move while the function is in use.
        bias_N: bias of the same dtype.

    Returns:
        The function, or None if the compiled kernels do not support these weights.
    """
    dtype = weight_NK.dtype
    kernel = function(f"linear_{str(dtype).removeprefix('torch.')}", pointers=4, numbers=3)
    outputs, inputs = weight_NK.shape
    if kernel is None or not _are_readable(weight_NK, dtype, bias_N, dtype):
        return None
    is_exact = dtype == torch.float32  # fp32: the bits of a row do not depend on the other rows
    weight, bias = weight_NK.data_ptr(), None if bias_N is None else bias_N.data_ptr()

    def run(x: Tensor) -> Tensor:
        rows = x.numel() // inputs
        is_many = rows > MOST_BF16_ROWS and not is_exact
        if is_many or torch.is_grad_enabled() or not fits(x, dtype, *x.shape[:-1], inputs, by_row=True):
            return F.linear(x, weight_NK, bias_N)
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], outputs)
        kernel(x.data_ptr(), weight, bias, y.data_ptr(), rows, outputs, inputs)
        return y

    return run


def mixed_linear(
    weight_NK: Float[Tensor, "outputs inputs"], bias_N: Float[Tensor, " outputs"] | None
) -> LinearFunction | None:
    """Return a function that computes x weight^T + bias with x rounded to bf16 and with fp32 sums.

    Args:
        weight_NK: bf16 weights on the CPU, or fp16 weights that the kernels round to bf16 while they read them, row by
            row. Their memory must not move while the function is in use.
        bias_N: fp32 bias.

    Returns:
        The function, or None without compiled kernels.
    """
    is_fp16 = weight_NK.dtype == torch.float16
    kernel = function("linear_mixed_float16" if is_fp16 else "linear_mixed", pointers=4, numbers=3)
    outputs, inputs = weight_NK.shape
    dtype = torch.float16 if is_fp16 else torch.bfloat16
    if kernel is None or not _are_readable(weight_NK, dtype, bias_N, torch.float32):
        return None
    weight, bias = weight_NK.data_ptr(), None if bias_N is None else bias_N.data_ptr()

    def run(x: Tensor) -> Tensor:
        rows = x.numel() // inputs
        if rows > MOST_BF16_ROWS or not fits(x, torch.float32, *x.shape[:-1], inputs, by_row=True):
            y = F.linear(x.bfloat16(), weight_NK.bfloat16()).float()
            return y if bias_N is None else y.add_(bias_N)
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], outputs)
        kernel(x.data_ptr(), weight, bias, y.data_ptr(), rows, outputs, inputs)
        return y

    return run


def int8_linear(
    weight_NK: Int8[Tensor, "outputs inputs"],
    scale_N: Float[Tensor, " outputs"],
    bias_N: Float[Tensor, " outputs"] | None,
) -> LinearFunction:
    """Return a function that computes x (weight * scale)^T + bias; each row of x is rounded to 8 bits too.

    Args:
        weight_NK: 8-bit weights on the CPU, row by row. Their memory must not move while the function is in use.
        scale_N: fp32 scale of each output.
        bias_N: fp32 bias.

    Returns:
        The function. Without compiled kernels, PyTorch multiplies in 8 bits if it has AVX-512 VNNI for that. Otherwise
        it multiplies in fp32, with unrounded x and with weights that are dequantized now and kept.
    """
    kernel = function("linear_int8", pointers=5, numbers=3)
    outputs, inputs = weight_NK.shape
    is_fit = _are_readable(weight_NK, torch.int8, bias_N, torch.float32) and fits(scale_N, torch.float32, outputs)
    if not is_fit or (kernel is None and not _multiplies_bytes(weight_NK)):
        wide_NK = weight_NK * scale_N[:, None].float()  # 16-bit scales would round each product
        return lambda x: F.linear(x, wide_NK.to(x.dtype), bias_N)

    def run(x: Tensor) -> Tensor:
        if not fits(x, torch.float32, *x.shape[:-1], inputs, by_row=True) or x.numel() == 0:
            return F.linear(x, weight_NK * scale_N[:, None].to(x.dtype), bias_N)
        if kernel is None:
            return _multiply_rounded_rows(x, weight_NK, scale_N, bias_N)
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], outputs)
        bias = None if bias_N is None else bias_N.data_ptr()
        addresses = x.data_ptr(), weight_NK.data_ptr(), scale_N.data_ptr(), bias, y.data_ptr()
        kernel(*addresses, x.numel() // inputs, outputs, inputs)
        return y

    return run


def int4_linear(weight_N: Nibbles, scale_NG: GroupScales, bias_N: Float[Tensor, " outputs"] | None) -> LinearFunction:
    """Return a function that computes x weight^T + bias with 4-bit weights; each row of x is rounded to 8 bits.

    Args:
        weight_N: nibbles [outputs, inputs / 2] on the CPU. Their memory and that of the scales must not move while the
            function is in use.
        scale_NG: fp16 scales [outputs, inputs / 32].
        bias_N: fp32 bias.

    Returns:
        The function. Without compiled kernels it multiplies in fp32, with unrounded x and with weights that are
        dequantized now and kept.
    """
    kernel = function("linear_int4", pointers=5, numbers=3)
    outputs, groups = scale_NG.shape
    inputs = groups * GROUP
    are_read = fits(weight_N, torch.uint8, outputs, inputs // 2) and fits(scale_NG, torch.float16, outputs, groups)
    if kernel is None or not are_read or not (bias_N is None or fits(bias_N, torch.float32, outputs)):
        wide_NK = widen_groups(weight_N, scale_NG)
        return lambda x: F.linear(x, wide_NK.to(x.dtype), bias_N)

    def run(x: Tensor) -> Tensor:
        if not fits(x, torch.float32, *x.shape[:-1], inputs, by_row=True) or x.numel() == 0:
            return F.linear(x, widen_groups(weight_N, scale_NG).to(x.dtype), bias_N)
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], outputs)
        bias = None if bias_N is None else bias_N.data_ptr()
        addresses = x.data_ptr(), weight_N.data_ptr(), scale_NG.data_ptr(), bias, y.data_ptr()
        kernel(*addresses, x.numel() // inputs, outputs, inputs)
        return y

    return run


def _multiplies_bytes(weight_NK: Tensor) -> bool:
    return has_exact_int_mm() and weight_NK.is_cpu and weight_NK.numel() >= LEAST_BYTES


def _multiply_rounded_rows(x: Tensor, weight_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    """Round each row by its largest magnitude, like the kernels, and multiply in PyTorch; sums are exact."""
    x_MK = x.flatten(0, -2) if x.dim() > 1 else x[None]
    most_M1 = torch.linalg.vector_norm(x_MK, torch.inf, 1, keepdim=True)
    # LARGEST as a tensor: PyTorch divides a Python number by a tensor in two steps.
    rounded_MK = (x_MK * (x.new_tensor(LARGEST) / most_M1)).round_().to(torch.int8)
    # NaN if a number of the row is NaN or infinite.
    row_scale_M1 = most_M1 / LARGEST + most_M1 * 0.0
    y_MN = torch._int_mm(rounded_MK, weight_NK.t()).float().mul_(row_scale_M1 * scale_N)
    if bias_N is not None:
        y_MN.add_(bias_N)
    return y_MN.view(*x.shape[:-1], len(weight_NK))


def _are_readable(weight: Tensor, dtype: torch.dtype, bias: Tensor | None, bias_dtype: torch.dtype) -> bool:
    """Return whether the kernels can read a matrix and its bias directly."""
    has_bias_for_all = bias is None or fits(bias, bias_dtype, len(weight))
    return has_bias_for_all and fits(weight, dtype, *weight.shape)
