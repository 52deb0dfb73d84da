"""The position-wise network. Legend: B batch, T tokens, D width, F inner size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.core.dropout import Dropout


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the pointwise function of that name; the two forms of GELU differ by up to 5e-4 (arXiv 1606.08415)."""
    match name:
        case "relu":
            return F.relu
        case "gelu":
            return F.gelu
        case "gelu_tanh":
            return lambda x: F.gelu(x, approximate="tanh")
        case "silu":
            return F.silu
        case "tanh":
            return torch.tanh
    raise AssertionError(f"the spec admits no activation named {name}")


class FeedForward(nn.Module):
    """down(dropout(act(up(x)))), or down(dropout(act(gate(x)) * up(x))) where gated.

    Source: arXiv 1706.03762, eq. 2; arXiv 2002.05202, eq. 6.
    """

    def __init__(self, width: int, feed_forward: spec.FeedForward) -> None:
        super().__init__()
        self.spec = feed_forward
        self.up = nn.Linear(width, feed_forward.size, bias=feed_forward.bias_in)
        self.gate = nn.Linear(width, feed_forward.size, bias=feed_forward.bias_in) if feed_forward.gated else None
        self.dropout = Dropout(feed_forward.dropout)
        self.down = nn.Linear(feed_forward.size, width, bias=feed_forward.bias_out)
        self.activation = activation(feed_forward.activation)

    def forward(self, x_BTD: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        if self.gate is None:
            inner_BTF = self.activation(self.up(x_BTD))
        else:
            inner_BTF = self.activation(self.gate(x_BTD)) * self.up(x_BTD)
        return self.down(self.dropout(inner_BTF))
