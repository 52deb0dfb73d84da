"""The one equation of every Transformer. Legend: B batch, T tokens, D width.

    x <- out( x + sum_b scale_b * dropout( post_b( f_b( pre_b( pre(x) ) ) ) ) )

An absent norm is the identity. `out` alone is the original Transformer, `pre` of a branch alone its pre-norm form.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from clearhead import spec
from clearhead.core.attention import Attention, MemoryAttention
from clearhead.core.context import Context
from clearhead.core.feedforward import FeedForward
from clearhead.core.hooks import HookPoints
from clearhead.core.norm import build_norm
from clearhead.core.rare.disentangled import DisentangledAttention
from clearhead.core.rare.mixture_of_experts import MixtureOfExperts
from clearhead.core.rare.score_bias import BiasedAttention
from clearhead.kernels.dropout import Dropout


def build_attention(width: int, attention: spec.Attention, memory_width: int | None = None) -> Attention:
    """Build the attention that the source and the score bias of a spec ask for."""
    if attention.source == "memory":
        return MemoryAttention(width, attention, memory_width)
    if attention.score_bias is None:
        return Attention(width, attention)
    is_disentangled = isinstance(attention.score_bias, spec.Disentangled)
    return (DisentangledAttention if is_disentangled else BiasedAttention)(width, attention)


def build_function(width: int, function: spec.Function, memory_width: int | None) -> nn.Module:
    """Build the function of a branch."""
    match function:
        case spec.Attention():
            return build_attention(width, function, memory_width)
        case spec.FeedForward():
            return FeedForward(width, function)
        case spec.MixtureOfExperts():
            return MixtureOfExperts(width, function)


class Branch(nn.Module):
    """scale * dropout(post(function(pre(x))))."""

    def __init__(self, width: int, branch: spec.Branch, memory_width: int | None) -> None:
        super().__init__()
        self.pre = build_norm(width, branch.pre)
        self.function = build_function(width, branch.function, memory_width)
        self.post = build_norm(width, branch.post)
        self.dropout = Dropout(branch.dropout)
        self.scale = branch.scale

    def forward(
        self, x_BTD: Float[Tensor, "batch tokens width"], context: Context
    ) -> Float[Tensor, "batch tokens width"]:
        x_BTD = self.pre(x_BTD)
        is_attention = isinstance(self.function, Attention)
        y_BTD = self.function(x_BTD, context) if is_attention else self.function(x_BTD)
        y_BTD = self.dropout(self.post(y_BTD))
        return y_BTD if self.scale == 1.0 else y_BTD * self.scale


class Step(HookPoints):
    """out(x + the sum of the branches of pre(x))."""

    points = ("before", "after")

    def __init__(self, width: int, step: spec.Step, memory_width: int | None) -> None:
        super().__init__()
        self.pre = build_norm(width, step.pre)
        self.branches = nn.ModuleList(Branch(width, branch, memory_width) for branch in step.branches)
        self.out = build_norm(width, step.out)

    def forward(
        self, x_BTD: Float[Tensor, "batch tokens width"], context: Context
    ) -> Float[Tensor, "batch tokens width"]:
        x_BTD = self.point("before", x_BTD)
        shared_BTD = self.pre(x_BTD)
        for branch in self.branches:
            x_BTD = x_BTD + branch(shared_BTD, context)
        return self.point("after", self.out(x_BTD))


class Layer(HookPoints):
    """Residual steps, one after the other."""

    points = ("before", "after")

    def __init__(self, width: int, layer: spec.Layer, memory_width: int | None) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Step(width, step, memory_width) for step in layer.steps)

    def forward(
        self, x_BTD: Float[Tensor, "batch tokens width"], context: Context
    ) -> Float[Tensor, "batch tokens width"]:
        x_BTD = self.point("before", x_BTD)
        for step in self.steps:
            x_BTD = step(x_BTD, context)
        return self.point("after", x_BTD)
