"""Linear layers in fp32 by oneDNN during training, for processors on which PyTorch's own library is slower."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.fast.native.load import uses_kernels
from clearhead.fast.probe import processor


@cache
def has_faster_products() -> bool:
    """Return whether oneDNN multiplies in fp32 faster than MKL: MKL uses AVX-512 only on Intel processors."""
    is_wide = processor().torch_kernels == "AVX512" and torch.backends.mkl.is_available()
    if not is_wide or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return processor().vendor not in ("GenuineIntel", "")


def multiplies(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear` supports a layer: rows and weights in fp32, with gradients enabled."""
    return type(weight) is nn.Parameter and weight.dtype == torch.float32 and _are_multiplied(x)


def multiplies_frozen(x: Tensor) -> bool:
    """Return whether `product` should multiply rows with a frozen weight: in fp32, with gradients enabled."""
    return uses_kernels() and has_faster_products() and _are_multiplied(x)


def _are_multiplied(x: Tensor) -> bool:
    is_traced = torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()
    is_plain = x.dtype == torch.float32 and not is_traced
    return is_plain and torch.is_grad_enabled() and x.dim() >= 2 and x.numel() > 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x weight^T + bias like `F.linear`, up to the order of sums, forward and backward.

    Args:
        x: fp32 rows [*axes, inputs].
        weight: fp32 weights [outputs, inputs].
        bias: fp32 bias [outputs].
    """
    y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


def product(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias by oneDNN; the arguments are those of `linear`."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, bias_N, "none", [], "")
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        return product(x, weight_NK, bias_N)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x, weight_NK), (gradient,) = ctx.saved_tensors, gradients
        gradient_MN, x_MK = gradient.flatten(0, -2), x.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            product(gradient_MN, weight_NK.t()).view_as(x) if wants_x else None,
            product(gradient_MN.t(), x_MK.t()) if wants_weight else None,
            gradient_MN.sum(0) if wants_bias else None,
        )
