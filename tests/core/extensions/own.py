"""One small custom module for each role, as in a user's file."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.core.context import Context


@dataclass(frozen=True)
class LastTokens:
    count: int
    rate: float = 0.0

    def __post_init__(self) -> None:
        if self.count > 7:
            raise ValueError(f"count is at most 7, got {self.count}")


@ch.register(LastTokens)
class MeanOfLastTokens(ch.HookPoints):
    """Caches nothing, so it reads all tokens again."""

    points = ("mean",)

    def __init__(self, width: int, settings: LastTokens) -> None:
        super().__init__()
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(settings.rate)
        self.gain = nn.Parameter(torch.full((width,), 3.0))
        self.register_buffer("shares", torch.arange(1.0, settings.count + 1.0), persistent=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        mask, total = context.masking.key_mask, torch.zeros_like(x)
        x = x * self.gain if mask is None else x * self.gain * mask[..., None]
        for back, share in enumerate(self.shares):
            total = total + share * nn.functional.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        return self.dropout(self.out(self.point("mean", total)))


@dataclass(frozen=True)
class Gain:
    start: float = 1.0


@ch.register(Gain, role="norm")
class GainNorm(nn.Module):
    def __init__(self, width: int, settings: Gain) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), settings.start))

    def forward(self, x: Tensor, context: None) -> Tensor:
        return x / (1 + x.abs().mean(-1, keepdim=True)) * self.weight


@dataclass(frozen=True)
class Ramp:
    slope: float = 0.1


@ch.register(Ramp, role="position")
class RampPosition(nn.Module):
    def __init__(self, width: int, settings: Ramp) -> None:
        super().__init__()
        self.direction, self.slope = nn.Parameter(torch.ones(width)), settings.slope

    def forward(self, x: Tensor, context: None) -> Tensor:
        return self.slope * x[..., None] * self.direction


@dataclass(frozen=True)
class Tilt:
    slope: float = 0.3


@ch.register(Tilt, role="scores")
class TiltScores(nn.Module):
    """A bias by distance with a learned slope for each head."""

    def __init__(self, num_heads: int, settings: Tilt) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((num_heads,), settings.slope))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        distance = context.query_position[:, None, :, None] - context.key_position[:, None, None, :]
        return x - self.slope[:, None, None] * distance


@dataclass(frozen=True)
class Offbeat:
    """Softmax with an additional constant in its denominator."""


@ch.register(Offbeat, role="weights")
class OffbeatWeights(nn.Module):
    def __init__(self, num_heads: int, settings: Offbeat) -> None:
        super().__init__()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        top = x.amax(-1, keepdim=True).clamp(min=0.0)
        share = (x - top).exp()
        return share / (share.sum(-1, keepdim=True) + (-top).exp())
