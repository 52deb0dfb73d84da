"""LayerNorm and RMSNorm over the last axis: all norms of the equation in `stack`. Legend: D width."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.base.printing import PrintedModule
from clearhead.spec.registry import build_part

Vectors = Float[Tensor, "*axes width"]


class Norm(PrintedModule, nn.Module):
    """Base class of LayerNorm and RMSNorm: normalize(x) * weight + bias.

    Args:
        shape: shape of the weight: width, or (heads, width) if each head has its own weight.
        norm: spec of the norm: epsilon, and whether there are a weight and a bias.
    """

    def __init__(self, shape: int | tuple[int, ...], norm: spec.LayerNorm | spec.RMSNorm) -> None:
        super().__init__()
        shape = (shape,) if isinstance(shape, int) else shape
        self.eps: float = norm.eps
        self.has_unit_offset: bool = norm.unit_offset
        self.is_by_head: bool = len(shape) > 1
        neutral = 0.0 if norm.unit_offset else 1.0
        self.weight: nn.Parameter | None = nn.Parameter(torch.full(shape, neutral)) if norm.weight else None
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(shape)) if getattr(norm, "bias", False) else None

    def forward(self, x_D: Vectors) -> Vectors:
        weight = self.weight + 1.0 if self.weight is not None and self.has_unit_offset else self.weight
        if not self.is_by_head:
            return self.normalize(x_D, weight, self.bias)
        normed_D = self.normalize(x_D, None, None) * (1.0 if weight is None else weight)
        return normed_D if self.bias is None else normed_D + self.bias

    def normalize(self, x_D: Vectors, weight: Tensor | None, bias: Tensor | None) -> Vectors:
        raise NotImplementedError


class LayerNorm(Norm):
    """Layer norm: (x - mean) / sqrt(biased variance + eps) * weight + bias. Source: arXiv 1607.06450, eq. 3."""

    def normalize(self, x_D: Vectors, weight: Tensor | None, bias: Tensor | None) -> Vectors:
        return F.layer_norm(x_D, x_D.shape[-1:], weight, bias, self.eps)


class RMSNorm(Norm):
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight. Source: arXiv 1910.07467, eq. 4."""

    def normalize(self, x_D: Vectors, weight: Tensor | None, bias: Tensor | None) -> Vectors:
        return F.rms_norm(x_D, x_D.shape[-1:], None if weight is None else weight.to(x_D.dtype), self.eps)


def build_norm(width: int | tuple[int, int], norm: spec.LayerNorm | spec.RMSNorm | spec.Part | None) -> nn.Module:
    """Build a norm from its spec, or the identity for None. `width` is (heads, size) for separate weights per head."""
    if norm is None:
        return nn.Identity()
    if isinstance(norm, spec.LayerNorm | spec.RMSNorm):
        return (LayerNorm if isinstance(norm, spec.LayerNorm) else RMSNorm)(width, norm)
    assert isinstance(width, int), "a custom norm has no weight per head"
    return build_part(norm, width)
