"""The position-wise network. Legend: B batch, T tokens, D width, F inner size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.kernels.dropout import Dropout


def activation(name: spec.ActivationName) -> Callable[[Tensor], Tensor]:
    """Return the pointwise function of that name; the three forms of GELU differ (arXiv 1606.08415, section 2)."""
    match name:
        case "relu":
            return F.relu
        case "gelu":
            return F.gelu
        case "gelu_tanh":
            return lambda x: F.gelu(x, approximate="tanh")
        case "silu":
            return F.silu
        case "relu2":
            return lambda x: F.relu(x).square()
        case "quick_gelu":
            return lambda x: x * torch.sigmoid(1.702 * x)
        case "tanh":
            return torch.tanh
    raise AssertionError(f"the spec admits no activation named {name}")


def activate(
    form: spec.ActivationName | spec.ClampedGate,
    up: Float[Tensor, "*axes size"],
    gate: Float[Tensor, "*axes size"] | None,
) -> Float[Tensor, "*axes size"]:
    """Apply an activation to the inner layer, or to its gate where there is one. Source: arXiv 2002.05202, eq. 5-6."""
    if isinstance(form, spec.ClampedGate):
        assert gate is not None
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
        return (up + 1.0) * gate * torch.sigmoid(form.alpha * gate)
    return activation(form)(up) if gate is None else activation(form)(gate) * up


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

    def forward(self, x_BTD: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        gate_BTF = None if self.gate is None else self.gate(x_BTD)
        inner_BTF = activate(self.spec.activation, self.up(x_BTD), gate_BTF)
        return self.down(self.dropout(inner_BTF))
