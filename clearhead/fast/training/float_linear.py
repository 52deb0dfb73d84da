"""Linear layers in fp32 by oneDNN while they are trained, on processors where PyTorch's own library is slower."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.fast.probe import processor


@cache
def has_faster_products() -> bool:
    """Return whether oneDNN multiplies in fp32 faster than MKL does: MKL uses AVX-512 on processors of Intel alone."""
    is_wide = processor().torch_kernels == "AVX512" and torch.backends.mkl.is_available()
    if not is_wide or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return processor().vendor not in ("GenuineIntel", "")


def multiplies(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear` computes a layer: rows and weights in fp32, which need a gradient."""
    is_plain = type(weight) is nn.Parameter and x.dtype == weight.dtype == torch.float32
    is_traced = torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()
    return is_plain and not is_traced and torch.is_grad_enabled() and x.dim() >= 2 and x.numel() > 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x weight^T + bias as `F.linear` does, up to the order of sums, forward and backward.

    Args:
        x: fp32 [*axes, inputs].
        weight: fp32 [outputs, inputs].
        bias: fp32 [outputs].
    """
    y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


def _product(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, bias_N, "none", [], "")
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        return _product(x, weight_NK, bias_N)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x, weight_NK), (gradient,) = ctx.saved_tensors, gradients
        gradient_MN, x_MK = gradient.flatten(0, -2), x.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            _product(gradient_MN, weight_NK.t()).view_as(x) if wants_x else None,
            _product(gradient_MN.t(), x_MK.t()) if wants_weight else None,
            gradient_MN.sum(0) if wants_bias else None,
        )
