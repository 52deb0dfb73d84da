"""Stacks of layers, and the equation of each residual step in a Transformer. Legend: B batch, T tokens, D width.

    x <- out( x + sum_b scale_b * dropout( post_b( f_b( pre_b( pre(x) ) ) ) ) )

An absent norm is the identity. The original Transformer has `out` alone, its pre-norm form `pre_b` alone.
"""

from __future__ import annotations

from torch import nn

from clearhead import spec
from clearhead.base.hooks import HookPoints
from clearhead.core.attention import Attention, MemoryAttention
from clearhead.core.context import Cache, Context, Sequence
from clearhead.core.embedding import Embedding
from clearhead.core.feedforward import FeedForward
from clearhead.core.norm import build_norm
from clearhead.core.rare.disentangled import DisentangledAttention
from clearhead.core.rare.mixture_of_experts import MixtureOfExperts
from clearhead.core.rare.score_bias import BiasedAttention, build_score_table
from clearhead.core.shapes import Memory, RealMemory, States
from clearhead.spec.registry import build_part


def build_function(width: int, function: spec.Function, memory_width: int | None = None) -> nn.Module:
    """Build the function f_b of a branch: attention, feed-forward network, mixture of experts or custom module."""
    match function:
        case spec.Attention(source="memory"):
            return MemoryAttention(width, function, memory_width)
        case spec.Attention(score_bias=spec.Disentangled()):
            return DisentangledAttention(width, function)
        case spec.Attention(score_bias=None):
            return Attention(width, function)
        case spec.Attention():
            return BiasedAttention(width, function)
        case spec.FeedForward():
            return FeedForward(width, function)
        case spec.MixtureOfExperts():
            return MixtureOfExperts(width, function)
    return build_part(function, width)


class Branch(nn.Module):
    """Residual branch: scale * dropout(post(function(pre(x))))."""

    def __init__(self, width: int, branch: spec.Branch, memory_width: int | None) -> None:
        super().__init__()
        self.pre: nn.Module = build_norm(width, branch.pre)
        self.function: nn.Module = build_function(width, branch.function, memory_width)
        self.post: nn.Module = build_norm(width, branch.post)
        self.dropout: nn.Dropout = nn.Dropout(branch.dropout)
        self.scale: float = branch.scale

    def forward(self, x_BTD: States, context: Context) -> States:
        y_BTD = self.dropout(self.post(self.function(self.pre(x_BTD), context)))
        return y_BTD if self.scale == 1.0 else y_BTD * self.scale


class Step(HookPoints):
    """Residual step: out(x + the sum of all branches applied to pre(x))."""

    points: tuple[str, ...] = ("before", "after")

    def __init__(self, width: int, step: spec.Step, memory_width: int | None) -> None:
        super().__init__()
        self.pre: nn.Module = build_norm(width, step.pre)
        self.branches: nn.ModuleList = nn.ModuleList(Branch(width, branch, memory_width) for branch in step.branches)
        self.out: nn.Module = build_norm(width, step.out)

    def forward(self, x_BTD: States, context: Context) -> States:
        x_BTD = self.point("before", x_BTD)
        shared_BTD = self.pre(x_BTD)
        for branch in self.branches:
            x_BTD = x_BTD + branch(shared_BTD, context)
        return self.point("after", self.out(x_BTD))


class Layer(HookPoints):
    """Transformer layer: residual steps, such as attention and feed-forward, one after the other."""

    points: tuple[str, ...] = ("before", "after")

    def __init__(self, width: int, layer: spec.Layer, memory_width: int | None) -> None:
        super().__init__()
        self.steps: nn.ModuleList = nn.ModuleList(Step(width, step, memory_width) for step in layer.steps)

    def forward(self, x_BTD: States, context: Context) -> States:
        x_BTD = self.point("before", x_BTD)
        for step in self.steps:
            x_BTD = step(x_BTD, context)
        return self.point("after", x_BTD)


class Stack(HookPoints):
    """Encoder or decoder: final_norm(layers(embedding(ids))).

    Layers that share their weights exist once and run at several depths. Source: arXiv 1909.11942, section 3.1.
    """

    points: tuple[str, ...] = ("embedded",)

    def __init__(self, stack: spec.Stack, memory_width: int | None = None) -> None:
        super().__init__()
        width = stack.width
        self.embedding: Embedding = Embedding(width, stack.embedding)
        self.score_table: nn.Module | None = build_score_table(width, stack.score_table)
        self.order: tuple[int, ...] = stack.sharing or tuple(range(len(stack.layers)))
        self.layers: nn.ModuleList = nn.ModuleList(Layer(width, layer, memory_width) for layer in stack.layers)
        self.final_norm: nn.Module = build_norm(width, stack.final_norm)

    def forward(
        self, sequence: Sequence, memory: Memory | None = None, memory_mask: RealMemory | None = None,
        cache: Cache | None = None,
    ) -> States:  # fmt: skip
        context = Context.of(sequence, memory, memory_mask, cache)
        return self.continue_from(0, self.embed(sequence, context), context)

    def embed(self, sequence: Sequence, context: Context) -> States:
        limit = context.masking.num_keys if sequence.positions is None else int(sequence.positions.max()) + 1
        x_BTD = self.embedding(sequence.ids, context.query_position, limit, sequence.segments, sequence.embeddings)
        return self.point("embedded", x_BTD)

    def continue_from(self, depth: int, x_BTD: States, context: Context) -> States:
        """Run the layers from number `depth` on, then the final norm, and return the states [B, T, D]."""
        for context.depth in range(depth, len(self.order)):
            x_BTD = self.layers[self.order[context.depth]](x_BTD, context)
        return self.final_norm(x_BTD)
