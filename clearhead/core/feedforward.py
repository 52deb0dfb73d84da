"""Feed-forward network, a function f_b of the equation in `stack`. Legend: B batch, T tokens, D width, F inner size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.base.printing import PrintedModule
from clearhead.core.shapes import States

Inner = Float[Tensor, "*axes size"]

# The three forms of GELU differ (arXiv 1606.08415, section 2).
ACTIVATIONS: dict[spec.ActivationName, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
}


def activate(form: spec.ActivationName | spec.ClampedGate, up: Inner, gate: Inner | None) -> Inner:
    """Return activation(up), activation(gate) * up, or the `ClampedGate` of both. Source: arXiv 2002.05202, eq. 5-6."""
    if isinstance(form, spec.ClampedGate):
        assert gate is not None
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
        return (up + 1.0) * gate * torch.sigmoid(form.alpha * gate)
    return ACTIVATIONS[form](up) if gate is None else ACTIVATIONS[form](gate) * up


class FeedForward(PrintedModule, nn.Module):
    """Feed-forward network: down(dropout(act(up(x)))), or down(dropout(act(gate(x)) * up(x))) with a gate.

    Source: arXiv 1706.03762, eq. 2; arXiv 2002.05202, eq. 6.
    """

    def __init__(self, width: int, feed_forward: spec.FeedForward) -> None:
        super().__init__()
        self.spec = feed_forward
        size, bias = feed_forward.size, feed_forward.bias_in
        self.up: nn.Linear = nn.Linear(width, size, bias=bias)
        self.gate: nn.Linear | None = nn.Linear(width, size, bias=bias) if feed_forward.gated else None
        self.dropout: nn.Dropout = nn.Dropout(feed_forward.dropout)
        self.down: nn.Linear = nn.Linear(size, width, bias=feed_forward.bias_out)

    def forward(self, x_BTD: States, context: object = None) -> States:
        gate_BTF = None if self.gate is None else self.gate(x_BTD)
        return self.down(self.dropout(activate(self.spec.activation, self.up(x_BTD), gate_BTF)))
