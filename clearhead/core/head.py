"""Output head: logits or vectors from the last x of the equation in `stack`. Legend: B batch, T tokens, V outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.base.printing import PrintedModule
from clearhead.base.tied import Tied
from clearhead.core.embedding import Table
from clearhead.core.feedforward import ACTIVATIONS
from clearhead.core.norm import Vectors, build_norm
from clearhead.core.shapes import Real, States


@dataclass(frozen=True)
class Projection:
    """Output projection: cap((states * scale) weight_VD^T + bias_V). Source of the cap: arXiv 2408.00118, section 2."""

    weight_VD: Float[Tensor, "outputs width"]
    bias_V: Float[Tensor, " outputs"] | None
    scale: float
    soft_cap: float | None = None

    def outputs(self, x_D: Vectors) -> Float[Tensor, "*axes outputs"]:
        outputs = F.linear(x_D if self.scale == 1.0 else x_D * self.scale, self.weight_VD, self.bias_V)
        return outputs if self.soft_cap is None else soft_cap(outputs, self.soft_cap)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Bound values smoothly: cap * tanh(x / cap)."""
    return cap * torch.tanh(x / cap)


class Linear(PrintedModule, nn.Module):
    """Linear layer of a head, with its own weight or a tied embedding table. Source: arXiv 1608.05859 (tying)."""

    tied: Tied[Table]

    def __init__(self, width: int, linear: spec.Linear) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = None if linear.weight else nn.Parameter(torch.empty(linear.size, width))
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(linear.size)) if linear.bias else None
        self.scale: float = linear.scale

    @property
    def projection(self) -> Projection:
        return Projection(w if (w := self.weight) is not None else self.tied.module.weight, self.bias, self.scale)

    def forward(self, x_D: Vectors) -> Float[Tensor, "*axes outputs"]:
        return self.projection.outputs(x_D)


class Pointwise(nn.Module):
    """Layer of a head without weights, such as an activation, a soft cap or L2 normalization."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x_D: Vectors) -> Vectors:
        return self.function(x_D)


class Pool(PrintedModule, nn.Module):
    """Pooling to one state per sequence. Source: arXiv 1908.10084, section 3 (mean and max); 2202.08904 (weighted)."""

    def __init__(self, pool: spec.Pool) -> None:
        super().__init__()
        self.modes: tuple[spec.PoolMode, ...] = pool.modes

    def forward(self, x_BTD: States, mask_BT: Real | None) -> Float[Tensor, "batch pooled"]:
        mask_BT = x_BTD.new_ones(x_BTD.shape[:2], dtype=torch.bool) if mask_BT is None else mask_BT
        return torch.cat([_pool(mode, x_BTD, mask_BT) for mode in self.modes], -1)


def _pool(mode: str, x_BTD: States, mask_BT: Real) -> Float[Tensor, "batch width"]:
    if mode == "max":
        return x_BTD.masked_fill(~mask_BT[..., None], -torch.inf).amax(1)
    if mode in ("mean", "root", "weighted"):
        weights_BT = (mask_BT * mask_BT.cumsum(1)).float() if mode == "weighted" else mask_BT
        total_B1 = weights_BT.sum(1, keepdim=True).clamp(min=1) ** (0.5 if mode == "root" else 1)
        blocks_BTD = F.pad(x_BTD * weights_BT[..., None], (0, -x_BTD.shape[-1] % 64))  # else rounding depends on T
        return (blocks_BTD.sum(1)[:, : x_BTD.shape[-1]] / total_B1).to(x_BTD.dtype)
    place_B = (mask_BT if mode == "first" else mask_BT.cumsum(1)).int().argmax(1)  # argmax finds the first maximum
    return x_BTD[torch.arange(len(x_BTD), device=x_BTD.device), place_B]


class Head(nn.Module):
    """Output head: a sequence of layers; a `Pool` layer turns the states of a sequence into one vector."""

    def __init__(self, width: int, head: spec.Head) -> None:
        super().__init__()
        self.layers: nn.ModuleList = nn.ModuleList()
        for index, layer in enumerate(head.layers):
            match layer:
                case spec.Linear():
                    self.layers.append(Linear(head.output_width(width, index), layer))
                case spec.LayerNorm() | spec.RMSNorm():
                    self.layers.append(build_norm(head.output_width(width, index), layer))
                case spec.Pool():
                    self.layers.append(Pool(layer))
                case spec.Activation():
                    self.layers.append(Pointwise(ACTIVATIONS[layer.function]))
                case spec.SoftCap():
                    self.layers.append(Pointwise(partial(soft_cap, cap=layer.value)))
                case spec.L2Normalize():
                    self.layers.append(Pointwise(partial(F.normalize, dim=-1)))
        self.is_pooled: bool = any(isinstance(layer, Pool) for layer in self.layers)
        self.soft_cap: float | None = layer.value if isinstance(layer, spec.SoftCap) else None  # cap of the last layer

    def forward(self, x_BTD: States, mask_BT: Real | None = None) -> Float[Tensor, "batch *tokens outputs"]:
        for layer in self.layers:
            x_BTD = layer(x_BTD, mask_BT) if isinstance(layer, Pool) else layer(x_BTD)
        return x_BTD

    def prepare(self, x_D: Vectors) -> Float[Tensor, "*axes last_width"]:
        """Return the states [..., width] before the last linear layer, for callers that compute few logits at once."""
        for layer in self.layers[: -1 if self.soft_cap is None else -2]:
            x_D = layer(x_D)
        return x_D

    def projection(self) -> Projection:
        """Return weight, bias, scale and soft cap of the last linear layer."""
        linear = self.layers[-1 if self.soft_cap is None else -2]
        assert isinstance(linear, Linear)
        return replace(linear.projection, soft_cap=self.soft_cap)
