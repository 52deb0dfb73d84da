"""A faster backward pass of attention: large products, which matrix units compute faster than the fused kernel.

Legend: B batch, H heads, T queries, S keys, E head size; C heads of a few rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from clearhead.core.attention import Attention
from clearhead.core.context import Context
from clearhead.kernels.attention import eager_is_better

Mix = Callable[[Tensor, Tensor, Tensor, Tensor | None, Context], Tensor]
Queries = Float[Tensor, "batch heads queries head_size"]
Keys = Float[Tensor, "batch heads keys head_size"]

_BLOCK: Final = 128
"""Queries whose weights exist at a time; the keys behind the last of them are skipped where the mask is causal."""
_CHUNK: Final = 1 << 21
"""Weights that exist at a time: the passes over them stay in a cache, and products are large enough."""


def mix(
    part: Attention, own: Mix, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, context: Context
) -> Tensor:
    """Mix values as an attention does, with the faster backward pass where it is one and there is one.

    Attentions that run by the eager kernel, and those that share key/value heads, keep their own.

    Args:
        part: the attention.
        own: its own method.
        query, key, value, bias, context: its arguments.
    """
    is_plain = bias is None and query.shape[1] == key.shape[1] and value.dtype == torch.bfloat16
    if not (is_plain and torch.is_grad_enabled()) or eager_is_better(query, key, bias) or part.kernel()[0] == "eager":
        return own(query, key, value, bias, context)
    is_causal = context.masking.is_only_causal(part.spec.mask)
    mask = None if is_causal else part.mask(context)
    return attention(query, key, value, mask, scale=part.scale, is_causal=is_causal)


def attention(
    query_BHTE: Queries,
    key_BHSE: Keys,
    value_BHSE: Keys,
    mask: Bool[Tensor, "#batch #heads #queries keys"] | None,
    *,
    scale: float,
    is_causal: bool = False,
) -> Queries:
    """Attend with PyTorch's fused kernel, in the dtype of the values, and by products in the backward pass.

    Args:
        query_BHTE, key_BHSE, value_BHSE: every query head has keys and values of its own.
        mask: True = may attend; a query with none gets zeros.
        scale: multiplies the products of queries and keys.
        is_causal: hides the keys behind each query, in place of a mask.

    Source: arXiv 2205.14135, appendix B.2 (the backward pass).
    """
    dtype = value_BHSE.dtype
    mixed: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        query_BHTE.to(dtype), key_BHSE.to(dtype), value_BHSE, mask, scale, is_causal
    )
    return mixed


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, is_causal: bool
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scale, ctx.is_causal = scale, is_causal
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        found = tuple(map(_like, (query, key, value)))
        batch, num_heads, num_queries, _ = query.shape
        at_once = max(1, _CHUNK // (num_heads * min(_BLOCK, num_queries) * key.shape[2]))
        hidden = None if mask is None else ~mask
        scaled = query * ctx.scale  # makes scaled scores, and the gradient of the keys
        for first in range(0, batch, at_once):
            rows = slice(first, min(first + at_once, batch))
            own = None if hidden is None else hidden[rows] if len(hidden) > 1 else hidden
            one, two, three, four = (part[rows].flatten(0, 1) for part in (scaled, key, value, gradients[0]))
            parts = _gradients(one, two, three, four, own, num_heads=num_heads, is_causal=ctx.is_causal)
            for gradient, made in zip(found, parts, strict=True):
                gradient[rows] = made.unflatten(0, (-1, num_heads))
        found[0].mul_(ctx.scale)
        return *found, None, None, None


def _gradients(
    query_CTE: Tensor,
    key_CSE: Tensor,
    value_CSE: Tensor,
    mixed_gradient_CTE: Tensor,
    hidden: Tensor | None,
    *,
    num_heads: int,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of scaled queries, of keys and of values."""
    num_queries, num_keys = query_CTE.shape[1], key_CSE.shape[1]
    query_gradient = torch.empty_like(query_CTE)
    key_gradient, value_gradient = (torch.zeros_like(one, dtype=torch.float32) for one in (key_CSE, value_CSE))
    for start in range(0, num_queries, _BLOCK):
        # Products of what lies side by side are faster by more than these copies take.
        block = slice(start, min(start + _BLOCK, num_queries))
        keys = slice(0, block.stop if is_causal else num_keys)
        query, mixed_gradient = query_CTE[:, block].contiguous(), mixed_gradient_CTE[:, block].contiguous()
        key, value = key_CSE[:, keys].contiguous(), value_CSE[:, keys].contiguous()
        weights = torch.bmm(query, key.mT)
        if is_causal:
            size = block.stop - block.start
            weights[:, :, block] += weights.new_full((size, size), float("-inf")).triu_(1)
        elif hidden is not None:
            part = hidden[:, :, block] if hidden.shape[2] > 1 else hidden
            weights.unflatten(0, (-1, num_heads)).masked_fill_(part, float("-inf"))
        weights = weights.softmax(-1)
        if hidden is not None:
            weights.nan_to_num_(0.0)  # of queries that may attend to nothing
        weights_gradient = torch.bmm(mixed_gradient, value.mT)
        scores_gradient = torch._softmax_backward_data(weights_gradient, weights, -1, weights.dtype)
        query_gradient[:, block] = torch.bmm(scores_gradient, key)
        key_gradient[:, keys] += torch.bmm(scores_gradient.mT, query)
        value_gradient[:, keys] += torch.bmm(weights.mT, mixed_gradient)
    return query_gradient, key_gradient, value_gradient


def _like(values_BHTE: Tensor) -> Tensor:
    """Return room for values, in which the heads of a token lie side by side."""
    batch, num_heads, tokens, size = values_BHTE.shape
    return values_BHTE.new_empty(batch, tokens, num_heads, size).transpose(1, 2)
