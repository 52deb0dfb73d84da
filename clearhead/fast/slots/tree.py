"""Replica of a model that decodes with a `SlotCache`: one new token in each row, without reading the host.

Legend: B batch, T queries, S keys, D width, H heads, K key/value heads, G query heads of a key head, E head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead import spec
from clearhead.core import Cache, Transformer
from clearhead.core.attention import Attention, attention_weights, repeat_heads
from clearhead.core.context import Context, Sequence
from clearhead.core.embedding import SinusoidalPosition
from clearhead.core.head import Head
from clearhead.core.kernels.positions import alibi_bias, rotary_angles
from clearhead.core.shapes import Keys, Memory, Queries, Real, RealMemory, Scores, States
from clearhead.core.stack import Stack
from clearhead.fast.replica import override, replica
from clearhead.fast.slots.cache import SlotCache

WIDTH_MULTIPLE = 64
"""The logits buffer has a multiple of this number of columns: matrix products write unaligned rows slowly."""


class SlotStack(Stack):
    """Stack whose context, in a step, comes from the `SlotCache`."""

    def forward(
        self,
        sequence: Sequence,
        memory: Memory | None = None,
        memory_mask: RealMemory | None = None,
        cache: Cache | None = None,
    ) -> States:
        """Return the states of the new tokens."""
        if not isinstance(cache, SlotCache):
            return super().forward(sequence, memory, memory_mask, cache)
        context = cache.context(memory, memory_mask)
        return self.continue_from(0, self.embed(sequence, context), context)


class SlotAttention(Attention):
    """Attention of one query in each row: constants by position come from tables, and all layers share a mask."""

    def attend(self, query: Queries, key: Keys, value: Keys, context: Context) -> Queries:
        """Return softmax(query key^T * scale + bias) value for a single token in each row."""
        if not isinstance(context.cache, SlotCache):
            return super().attend(query, key, value, context)
        bias = self.bias(query, key, context)
        if self.kernel()[0] != "fused":
            # Every row has a key, so the check for queries without a key, which reads the host, is left out.
            weights = attention_weights(self.scores(query, key, bias, context), None, self.sink)
            return weights.to(value.dtype) @ repeat_heads(value, weights.shape[1])
        heads = key.shape[1]
        allowed = self._additive_mask(query.dtype, context)
        if bias is not None:
            bias = bias.to(query.dtype) if allowed is None else bias.to(query.dtype) + allowed
            allowed = bias.reshape(len(bias), heads, -1, bias.shape[-1])
        # Query heads with a common key head are queries of this head: no fused kernel takes groups with a mask.
        folded = query.reshape(len(query), heads, -1, query.shape[-1])
        mixed = F.scaled_dot_product_attention(folded, key, value, allowed, scale=self.scale)
        return mixed.reshape(query.shape)

    def _additive_mask(self, dtype: torch.dtype, context: Context) -> Tensor | None:
        """Return the mask as numbers to add to the scores, 0 or -inf; None means no mask."""
        name = "additive", self.spec.source, self.mask_number, dtype
        if name not in context.shared:
            mask = self.mask(context)
            zeros = None if mask is None else torch.zeros_like(mask, dtype=dtype)
            context.shared[name] = None if zeros is None else zeros.masked_fill_(~mask, -torch.inf)
        additive: Tensor | None = context.shared[name]
        return additive

    def angles(self, rotary: spec.Rotary, context: Context) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rotation (RoPE) at the new tokens, from tables over all positions."""
        cache, name = context.cache, ("angles", self.rotation_number)
        if isinstance(cache, SlotCache) and name not in context.shared:
            if name not in cache.tables:
                both = rotary_angles(cache.index_1C, rotary, self.spec.head_size, None)
                cache.tables[name] = torch.stack([each[0, 0] for each in both]).to(cache.dtype)
            cos, sin = cache.tables[name][:, context.query_position[:, 0]]
            context.shared[name] = cos[:, None, None], sin[:, None, None]
        return super().angles(rotary, context)

    def bias(self, query: Queries, key: Keys, context: Context) -> Scores | None:
        """Return the bias to add to the scores; the slopes of ALiBi come from a table."""
        cache, kind = context.cache, self.spec.score_bias
        if isinstance(cache, SlotCache) and isinstance(kind, spec.Alibi):
            name = "alibi", self.spec.num_heads, kind.rounding, kind.slopes
            if name not in context.shared:
                context.shared[name] = self._alibi(name, kind, cache, context)
        return super().bias(query, key, context)

    def _alibi(self, name: object, kind: spec.Alibi, cache: SlotCache, context: Context) -> Tensor:
        zero, heads = cache.index_1C[:, :1], self.spec.num_heads
        if kind.rounding == "bfloat16":  # this bias depends on the position of the key alone
            if name not in cache.tables:
                cache.tables[name] = alibi_bias(zero, cache.index_1C, heads, kind)
            return cache.tables[name][..., : cache.num_keys]
        if name not in cache.tables:
            cache.tables[name] = alibi_bias(zero + 1, zero, heads, kind)  # minus the slopes
        distance = (context.query_position[:, None, :, None] - context.key_position[:, None, None, :]).abs()
        return distance.float() * cache.tables[name]


class SlotHead(Head):
    """Head that writes the logits of a step into a buffer with aligned rows.

    Attributes:
        buffer: logits [rows, columns]. None means that the head runs as in the plain tree.
    """

    buffer: Tensor | None = None

    def forward(self, x_BTD: States, mask_BT: Real | None = None) -> Tensor:
        """Return the logits [batch, 1, vocabulary] of the new tokens."""
        if self.buffer is None:
            return super().forward(x_BTD, mask_BT)
        projection, x_BD = self.projection(), self.prepare(x_BTD)[:, 0]
        weight_VD = projection.weight_VD
        logits_BV = self.buffer[: len(x_BD), : len(weight_VD)]
        if not x_BD.dtype == weight_VD.dtype == logits_BV.dtype:
            return logits_BV.copy_(super().forward(x_BTD, mask_BT)[:, 0])[:, None]
        torch.mm(x_BD if projection.scale == 1.0 else x_BD * projection.scale, weight_VD.t(), out=logits_BV)
        if projection.bias_V is not None:
            logits_BV.add_(projection.bias_V)
        if projection.soft_cap is not None:
            logits_BV.div_(projection.soft_cap).tanh_().mul_(projection.soft_cap)
        return logits_BV[:, None]


class SlotOwner(Transformer):
    """Tree of a `Runner` on a GPU: it keeps the slots of ended batches, with their recordings, for later batches.

    Attributes:
        idle: the slots that no batch has.
    """

    idle: list[Any]


def slot_tree(module: Transformer) -> Transformer:
    """Return a replica in evaluation mode that decodes with a `SlotCache`.

    Args:
        module: a model with a decoder and a head over a vocabulary, for which `eager_reason` is empty.
    """
    tree = replica(module)
    vars(tree).pop("idle", None)
    assert tree.decoder is not None and tree.head is not None
    override(tree.decoder, SlotStack)
    override(tree.head, SlotHead)
    for attention in tree.decoder.modules():
        if isinstance(attention, Attention):
            override(attention, SlotAttention)
    return tree


def prepare_tree(tree: Transformer, cache: SlotCache) -> Tensor:
    """Allocate what a tree of `slot_tree` keeps between steps, and return its logits buffer [rows, vocabulary].

    Args:
        tree: the tree; from now on only this cache may use it.
        cache: the cache of the tree.
    """
    assert tree.decoder is not None and isinstance(tree.head, SlotHead)
    weight = tree.head.projection().weight_VD
    columns = -(-len(weight) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    tree.head.buffer = weight.new_zeros(cache.rows, columns)
    position = tree.decoder.embedding.position
    if isinstance(position, SinusoidalPosition):
        # A table that grew later would leave recordings with the address of memory that was freed.
        position(cache.index_1C[:, :1], cache.columns)
    return tree.head.buffer[:, : len(weight)]
