"""An embedding and the layers above it. Legend: B batch, T tokens, S keys, D width."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor, nn

from clearhead import spec
from clearhead.core.cache import Cache
from clearhead.core.context import Context, Sequence
from clearhead.core.embedding import Embedding
from clearhead.core.hooks import HookPoints
from clearhead.core.norm import build_norm
from clearhead.core.rare.score_bias import build_score_table
from clearhead.core.residual import Layer


class Stack(HookPoints):
    """projection_out(final_norm(layers(embedding(ids)))).

    Layers that share their weights are there once and run at several depths. Source: arXiv 1909.11942, section 3.1.
    """

    points = ("embedded",)

    def __init__(self, stack: spec.Stack, memory_width: int | None = None) -> None:
        super().__init__()
        self.embedding = Embedding(stack.width, stack.embedding)
        self.score_table = build_score_table(stack.width, stack.score_table)
        self.order = stack.sharing or tuple(range(len(stack.layers)))
        self.layers = nn.ModuleList(Layer(stack.width, layer, memory_width) for layer in stack.layers)
        self.final_norm = build_norm(stack.width, stack.final_norm)
        out = stack.projection_out
        self.projection_out = nn.Linear(stack.width, out.size, bias=out.bias) if out else nn.Identity()

    def forward(
        self,
        sequence: Sequence,
        memory: Float[Tensor, "sentences memory_keys memory_width"] | None = None,
        memory_mask: Bool[Tensor, "sentences memory_keys"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch tokens width"]:
        context = Context.of(sequence, memory, memory_mask, cache)
        limit = context.masking.num_keys if sequence.positions is None else int(sequence.positions.max()) + 1
        x_BTD = self.embedding(sequence.ids, context.query_position, limit, sequence.segments, sequence.embeddings)
        return self.continue_from(0, self.point("embedded", x_BTD), context)

    def continue_from(
        self, depth: int, x_BTD: Float[Tensor, "batch tokens width"], context: Context
    ) -> Float[Tensor, "batch tokens out_width"]:
        """Run the layers from a depth on, and what follows them."""
        for context.depth in range(depth, len(self.order)):
            x_BTD = self.layers[self.order[context.depth]](x_BTD, context)
        return self.projection_out(self.final_norm(x_BTD))
