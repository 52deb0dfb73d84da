"""RMSNorm with fewer passes over its input than PyTorch, which has no kernel for it on a CPU.

Legend: N tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def normalizes(x: Tensor, weight: Tensor | None) -> bool:
    """Return whether `normalize` supports a norm: it has an fp32 weight, and gradients are enabled."""
    is_plain = weight is not None and x.dtype == weight.dtype == torch.float32
    return is_plain and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def normalize(x: Float[Tensor, "*axes width"], weight: Float[Tensor, " width"], eps: float) -> Tensor:
    """Normalize like an RMSNorm, up to the order of sums.

    Args:
        x, weight: fp32 rows, and the weights of the norm.
        eps: number added to the mean square.
    """
    normed: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_ND = x.flatten(0, -2)
        norm_N1 = torch.linalg.vector_norm(x_ND, dim=1, keepdim=True)
        rate_N1 = norm_N1.square_().div_(x_ND.shape[1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x_ND, weight_D, rate_N1)
        return torch.mul(x_ND, rate_N1).mul_(weight_D).view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x_ND, weight_D, rate_N1 = ctx.saved_tensors
        gradient_ND, rate_N = gradients[0].flatten(0, -2), rate_N1.squeeze(1)
        product_ND = gradient_ND * x_ND
        share_N = torch.mv(product_ND, weight_D).mul_(rate_N).mul_(rate_N).div_(-x_ND.shape[1])
        weight_gradient_D = torch.mv(product_ND.t(), rate_N)
        x_gradient_ND = torch.mul(gradient_ND, weight_D, out=product_ND)
        x_gradient_ND.addcmul_(x_ND, share_N.unsqueeze(1)).mul_(rate_N1)
        return x_gradient_ND.view(gradients[0].shape), weight_gradient_D, None
