"""The one equation of every Transformer. Legend: B batch, T tokens, D width.

    x <- out( x + sum_b scale_b * dropout( post_b( f_b( pre_b( pre(x) ) ) ) ) )

An absent norm is the identity. `out` alone is the original Transformer, `pre` of a branch alone its pre-norm form.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from clearhead import spec
from clearhead.core.attention import Attention, Context
from clearhead.core.feedforward import FeedForward
from clearhead.core.norm import build_norm
from clearhead.core.rare.mixture_of_experts import MixtureOfExperts
from clearhead.kernels.dropout import Dropout


class Branch(nn.Module):
    """scale * dropout(post(function(pre(x))))."""

    def __init__(self, width: int, branch: spec.Branch, memory_width: int | None) -> None:
        super().__init__()
        self.pre = build_norm(width, branch.pre)
        self.function: Attention | FeedForward | MixtureOfExperts
        match branch.function:
            case spec.Attention() as attention:
                self.function = Attention(width, attention, memory_width)
            case spec.FeedForward() as feed_forward:
                self.function = FeedForward(width, feed_forward)
            case spec.MixtureOfExperts() as mixture:
                self.function = MixtureOfExperts(width, mixture)
        self.post = build_norm(width, branch.post)
        self.dropout = Dropout(branch.dropout)
        self.scale = branch.scale

    def forward(
        self, x_BTD: Float[Tensor, "batch tokens width"], context: Context
    ) -> Float[Tensor, "batch tokens width"]:
        x_BTD = self.pre(x_BTD)
        if isinstance(self.function, Attention):
            y_BTD = self.function(x_BTD, context)
        else:
            y_BTD = self.function(x_BTD)
        y_BTD = self.dropout(self.post(y_BTD))
        return y_BTD if self.scale == 1.0 else y_BTD * self.scale


class Step(nn.Module):
    """out(x + the sum of the branches of pre(x))."""

    def __init__(self, width: int, step: spec.Step, memory_width: int | None) -> None:
        super().__init__()
        self.pre = build_norm(width, step.pre)
        self.branches = nn.ModuleList(Branch(width, branch, memory_width) for branch in step.branches)
        self.out = build_norm(width, step.out)

    def forward(
        self, x_BTD: Float[Tensor, "batch tokens width"], context: Context
    ) -> Float[Tensor, "batch tokens width"]:
        shared_BTD = self.pre(x_BTD)
        for branch in self.branches:
            x_BTD = x_BTD + branch(shared_BTD, context)
        return self.out(x_BTD)


class Layer(nn.Module):
    """Residual steps, one after the other."""

    def __init__(self, width: int, layer: spec.Layer, memory_width: int | None) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Step(width, step, memory_width) for step in layer.steps)

    def forward(
        self, x_BTD: Float[Tensor, "batch tokens width"], context: Context
    ) -> Float[Tensor, "batch tokens width"]:
        for step in self.steps:
            x_BTD = step(x_BTD, context)
        return x_BTD
