"""Normalisation over the last axis. Legend: D width."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with the biased variance. Source: arXiv 1607.06450, eq. 3.

    Args:
        shape: of the weight; its last axis is normalised, and one before it (heads) has weights of its own.
        norm: epsilon, and whether there are a weight and a bias.
    """

    def __init__(self, shape: tuple[int, ...], norm: spec.LayerNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        self.weight = _weight(shape, norm)
        self.bias = nn.Parameter(torch.zeros(shape)) if norm.bias else None
        self.has_unit_offset = norm.unit_offset

    def forward(self, x_D: Float[Tensor, "*axes width"]) -> Float[Tensor, "*axes width"]:
        weight = _factor(self.weight, self.has_unit_offset)
        if (weight is None or weight.dim() == 1) and (self.bias is None or self.bias.dim() == 1):
            return F.layer_norm(x_D, x_D.shape[-1:], weight, self.bias, self.eps)
        normed_D = F.layer_norm(x_D, x_D.shape[-1:], eps=self.eps)
        normed_D = normed_D if weight is None else normed_D * weight
        return normed_D if self.bias is None else normed_D + self.bias


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight. Source: arXiv 1910.07467, eq. 4.

    Args:
        shape: of the weight; its last axis is normalised, and one before it (heads) has weights of its own.
        norm: epsilon, and whether there is a weight.
    """

    def __init__(self, shape: tuple[int, ...], norm: spec.RMSNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        self.weight = _weight(shape, norm)
        self.has_unit_offset = norm.unit_offset

    def forward(self, x_D: Float[Tensor, "*axes width"]) -> Float[Tensor, "*axes width"]:
        weight = _factor(self.weight, self.has_unit_offset)
        if weight is None or weight.dim() == 1:
            return F.rms_norm(x_D, x_D.shape[-1:], weight, self.eps)
        return F.rms_norm(x_D, x_D.shape[-1:], eps=self.eps) * weight


def _weight(shape: tuple[int, ...], norm: spec.LayerNorm | spec.RMSNorm) -> nn.Parameter | None:
    if not norm.weight:
        return None
    return nn.Parameter(torch.zeros(shape) if norm.unit_offset else torch.ones(shape))


def _factor(weight: nn.Parameter | None, has_unit_offset: bool) -> Tensor | None:
    return weight + 1.0 if weight is not None and has_unit_offset else weight


def build_norm(width: int | tuple[int, int], norm: spec.LayerNorm | spec.RMSNorm | None) -> nn.Module:
    """Build the norm that the spec names; an absent norm is the identity.

    Args:
        width: of what is normalised; or how many heads have a weight of their own, and their size.
        norm: its kind; None: there is none.
    """
    shape = (width,) if isinstance(width, int) else width
    match norm:
        case spec.LayerNorm():
            return LayerNorm(shape, norm)
        case spec.RMSNorm():
            return RMSNorm(shape, norm)
        case None:
            return nn.Identity()
