"""Normalisation over the width. Legend: D width."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with the biased variance. Source: arXiv 1607.06450, eq. 3."""

    def __init__(self, width: int, norm: spec.LayerNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if norm.bias else None

    def forward(self, x_D: Float[Tensor, "*axes width"]) -> Float[Tensor, "*axes width"]:
        return F.layer_norm(x_D, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight. Source: arXiv 1910.07467, eq. 4."""

    def __init__(self, width: int, norm: spec.RMSNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_D: Float[Tensor, "*axes width"]) -> Float[Tensor, "*axes width"]:
        return F.rms_norm(x_D, self.weight.shape, self.weight, self.eps)


def build_norm(width: int, norm: spec.LayerNorm | spec.RMSNorm | None) -> nn.Module:
    """Build the norm that the spec names; an absent norm is the identity."""
    match norm:
        case spec.LayerNorm():
            return LayerNorm(width, norm)
        case spec.RMSNorm():
            return RMSNorm(width, norm)
        case None:
            return nn.Identity()
