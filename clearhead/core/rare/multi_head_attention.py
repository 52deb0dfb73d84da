"""Multi-head attention as a module for your own models. Legend: B batch, T queries, S keys, D width, H heads."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from clearhead import spec
from clearhead.base.arguments import check_tensor, explain_types
from clearhead.base.errors import InputError
from clearhead.base.printing import PrintedModule
from clearhead.base.tied import Tied
from clearhead.core.attention import Attention, repeat_heads
from clearhead.core.context import Context, Masking
from clearhead.core.initialize import initialize
from clearhead.core.kernels.positions import rotary_angles, rotate
from clearhead.core.shapes import MayAttend, States
from clearhead.core.stack import build_function

MASK_SHAPES = ("queries keys", "#batch queries keys", "#batch #heads #queries keys")
MASK_HINT = "; pass masks [batch, keys] as key_mask, the source of keys as memory, Causal() to the constructor"


@explain_types
class MultiHeadAttention(PrintedModule, nn.Module):
    """Multi-head attention module with newly initialized weights.

    Args:
        width: number of features of queries and memory.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads; None means num_heads.
        head_size: features per head; None means width / num_heads.
        bias: True gives the four projections biases.
        dropout: probability of dropping an attention weight in training.
        mask: mask that applies in every call, such as `Causal()`.
        position: rotation of queries and keys, or a bias on the scores; None means no positions.

    Raises:
        InputError: sizes that do not fit together.

    Source: arXiv 1706.03762, section 3.2.2.
    """

    def __init__(
        self, width: int, num_heads: int, *, num_kv_heads: int | None = None, head_size: int | None = None,
        bias: bool = True, dropout: float = 0.0, mask: spec.Mask = spec.Full(),
        position: spec.Rotary | spec.Alibi | spec.RelativeBuckets | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if head_size is None and (num_heads < 1 or width % num_heads):
            raise InputError(f"width must be a multiple of num_heads; got width {width} and {num_heads} heads")
        self.spec: spec.Attention = spec.Attention(
            num_heads=num_heads, num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads, mask=mask,
            head_size=width // num_heads if head_size is None else head_size, dropout=dropout,
            position=position if isinstance(position, spec.Rotary) else None,
            score_bias=None if isinstance(position, spec.Rotary) else position,
            bias=spec.Biases(query=bias, key=bias, value=bias, out=bias),
        )  # fmt: skip
        spec.validate(self.spec)
        inner = build_function(width, self.spec)
        assert isinstance(inner, Attention)
        self.query: nn.Linear = inner.query
        self.key: nn.Linear = inner.key
        self.value: nn.Linear = inner.value
        self.out: nn.Linear = inner.out
        self.score_bias: nn.Module | None = getattr(inner, "score_bias", None)
        self._attention = Tied(inner)  # its weights are registered above, under shorter names
        initialize(self, spec.Xavier())

    @property
    def attention(self) -> Attention:
        """The inner `Attention`, as in a whole model; its hook points capture scores and weights."""
        return self._attention.module

    def train(self, mode: bool = True) -> MultiHeadAttention:
        self.attention.train(mode)
        return super().train(mode)

    def forward(
        self, query: States, memory: Float[Tensor, "batch keys width"] | None = None,
        mask: Bool[Tensor, "queries keys"] | Bool[Tensor, "#batch queries keys"] | MayAttend | None = None,
        key_mask: Bool[Tensor, "#batch keys"] | None = None, return_weights: bool = False,
    ) -> States | tuple[States, Tensor]:  # fmt: skip
        """Return the attention output [batch, queries, width]; keys and values come from memory, or from query.

        Args:
            query, memory: input for the queries, and input for keys and values; memory None means self-attention.
            mask: True = may attend; [queries, keys], [batch, queries, keys] or [batch, heads, queries, keys].
            key_mask: True = a real token of the memory; both masks apply in addition to the constructor's mask.
            return_weights: True also returns the weights [batch, heads, queries, keys], before dropout.

        Raises:
            InputError: an argument has another shape, or a mask is not boolean.
        """
        sizes = {"heads": self.spec.num_heads, "width": self.query.in_features}
        sizes |= check_tensor("query", query, "numbers", ["batch queries width"], sizes)
        source = query if memory is None else memory
        sizes |= check_tensor("memory", source, "numbers", ["batch keys width"], sizes)
        check_tensor("mask", mask, "mask", MASK_SHAPES, sizes, MASK_HINT)
        check_tensor("key_mask", key_mask, "mask", ["#batch keys"], sizes, "; mask takes [queries, keys]")
        if mask is not None and mask.dim() < 4:
            mask = mask.reshape(-1, 1, *mask.shape[-2:])
        if key_mask is not None:
            mask = key_mask[:, None, None] & (True if mask is None else mask)
        inner, num_queries, num_keys = self.attention, query.shape[1], source.shape[1]
        positions = torch.arange(max(num_queries, num_keys), device=query.device)[None]
        # Where lengths differ, the queries are the last tokens of the keys, as in decoding with a cache.
        query_position = positions[:, max(0, num_keys - num_queries) :][:, :num_queries]
        context = Context(Masking(num_queries, num_keys, allowed=mask), query_position, positions[:, :num_keys])
        heads = inner.split(inner.query(query))
        key, value = (inner.split(project(source)) for project in (inner.key, inner.value))
        if (rotary := self.spec.position) is not None:
            length = positions.new_full((1, 1), num_keys)
            heads = rotate(heads, *rotary_angles(context.query_position, rotary, self.spec.head_size, length))
            key = rotate(key, *rotary_angles(context.key_position, rotary, self.spec.head_size, length))
        if not return_weights:
            return inner.merge(inner.attend(heads, key, value, context))
        weights = inner.weights(heads, key, inner.bias(heads, key, context), context)
        return inner.merge(inner.dropout(weights).to(value.dtype) @ repeat_heads(value, weights.shape[1])), weights
