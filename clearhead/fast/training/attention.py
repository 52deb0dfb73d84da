"""Attention in bf16 by compiled kernels of a CPU, forward and backward, a head at a time: no weights are kept.

Legend: B batch, H heads, T queries, S keys, E head size.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.base.hooks import is_seen
from clearhead.core.attention import Attention
from clearhead.fast.native.abi import AttentionCall, Heads, RotationCall, address
from clearhead.fast.replica import plain_type
from clearhead.fast.training.dropout import SeededDropout
from clearhead.fast.training.linear import run

Queries = Float[Tensor, "batch heads queries head_size"]
Keys = Float[Tensor, "batch heads keys head_size"]
Angles = Float[Tensor, "#batch 1 queries pairs"]

NO_DROPOUT: Final = SeededDropout()

_How = tuple[float, bool, SeededDropout]
_STEPS: Final = ("attend", "weights", "scores")


def needs_weights(module: Attention) -> bool:
    """Return whether an attention has to build its weights.

    They are watched, capped, have a sink, or are computed by a step or by a custom class.
    """
    is_own = any(getattr(plain_type(module), name) is not getattr(Attention, name) for name in _STEPS)
    has_step = module.score_step is not None or module.weight_step is not None
    is_watched = module.is_watched("scores", "weights") or is_seen(module.dropout)
    return is_own or has_step or is_watched or module.spec.soft_cap is not None or module.spec.sink


def attention(
    query_BHTE: Queries,
    key_BHSE: Keys,
    value_BHSE: Keys,
    mask: Bool[Tensor, "#batch #heads #queries keys"] | None,
    bias: Float[Tensor, "#batch #heads queries keys"] | None = None,
    *,
    scale: float,
    is_causal: bool = False,
    dropout: SeededDropout = NO_DROPOUT,
) -> Queries:
    """Attend in bf16 with scores, sums and the softmax in fp32; there are kernels for it.

    Args:
        query_BHTE, key_BHSE, value_BHSE: every query head has keys and values of its own.
        mask: True = may attend; a query with none gets zeros.
        bias: added to the scores, in fp32; its gradient is too.
        scale: multiplies the products of queries and keys.
        is_causal: hides the keys behind each query, in place of a mask; there are as many keys as queries.
        dropout: of the weights; the mask of a weight depends on the seed, row, head, query, key and number of keys.

    Source: arXiv 2205.14135, algorithm 1 and appendix B.2.
    """
    tensors = [tensor.to(torch.bfloat16) for tensor in (query_BHTE, key_BHSE, value_BHSE)]
    if bias is not None:
        bias = bias.float().expand(*query_BHTE.shape[:3], key_BHSE.shape[2])
    mixed: Tensor = _Attention.apply(*tensors, bias, mask, scale, is_causal, dropout)  # type: ignore[no-untyped-call]
    return mixed


def rotation(x_BHTE: Queries, cos: Angles, sin: Angles) -> Queries:
    """Rotate queries or keys in bf16 as `kernels.positions.rotate` does, by products in fp32 that are rounded once."""
    rotated: Tensor = _Rotation.apply(x_BHTE, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


def _heads(tensor: Tensor, shape: tuple[int, ...]) -> ctypes.Structure:
    head_struct: ctypes.Structure = Heads(address(tensor, torch.bfloat16, *shape, by_row=True), *tensor.stride()[:3])
    return head_struct


def _call(
    heads: list[Tensor], log_totals: Tensor, bias: Tensor | None, mask: Tensor | None, how: _How
) -> ctypes.Structure:
    (batch, num_heads, queries, size), keys = heads[0].shape, heads[1].shape[2]
    of_queries, of_keys = (batch, num_heads, queries, size), (batch, num_heads, keys, size)
    sizes = (of_queries, of_keys, of_keys, of_queries)
    call = AttentionCall(*map(_heads, heads, (*sizes, of_queries, *sizes[:3])))
    call.log_totals = address(log_totals, torch.float32, batch, num_heads, queries)
    if bias is not None:
        call.bias = address(bias, torch.float32, batch, num_heads, queries, keys, by_row=True)
        call.bias_batch, call.bias_head, call.bias_query = bias.stride()[:3]
    if mask is not None:
        expanded = mask.expand(batch, num_heads, queries, keys)
        call.mask = address(expanded[..., :1], torch.bool, batch, num_heads, queries, 1, by_row=True)
        call.mask_batch, call.mask_head, call.mask_query, call.mask_key = expanded.stride()
    call.B, call.H, call.T, call.S, call.E = batch, num_heads, queries, keys, size
    call.scale, call.is_causal, dropout = how
    dropout.fill(call)
    return call


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None, *how: Any
    ) -> Tensor:
        heads = [_side_by_side(tensor) for tensor in (query, key, value)]
        bias = None if bias is None else _side_by_side(bias)
        (mixed,) = _allocate_heads([query])
        log_totals = query.new_empty(query.shape[:3], dtype=torch.float32)
        run("attention_forward", _call([*heads, mixed], log_totals, bias, mask, how))
        ctx.save_for_backward(*heads, mixed, log_totals, bias, mask)
        ctx.how = how
        return mixed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *heads, log_totals, bias, mask = ctx.saved_tensors
        query, key, value = heads[:3]
        # Side by side, as the layers that made queries, keys and values together read their gradients.
        input_gradients = (
            _allocate_heads([query, key, value])
            if query.shape == key.shape
            else [*_allocate_heads([query]), *_allocate_heads([key, value])]
        )
        call = _call([*heads, _side_by_side(gradients[0]), *input_gradients], log_totals, bias, mask, ctx.how)
        bias_gradient = log_totals.new_empty(bias.shape) if ctx.needs_input_grad[3] else None
        if bias_gradient is not None:
            call.bias_gradient = address(bias_gradient, torch.float32, *bias.shape)
        run("attention_backward", call)
        return *input_gradients, bias_gradient, None, None, None, None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.angles = cos.contiguous(), sin.contiguous()
        return _rotate(x, *ctx.angles, is_back=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _rotate(gradients[0], *ctx.angles, is_back=True), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, is_back: bool) -> Tensor:
    heads, (y,) = _side_by_side(x), _allocate_heads([x])
    source, target = (_heads(tensor, x.shape) for tensor in (heads, y))
    angles = (address(angle, torch.float32, *cos.shape) for angle in (cos, sin))
    call = RotationCall(source, target, *angles, cos.stride(0) if len(cos) > 1 else 0)
    call.B, call.H, call.T, call.E = x.shape
    call.P, call.is_back = cos.shape[-1], is_back
    run("rotation", call)
    return y


def _side_by_side(heads: Tensor) -> Tensor:
    return heads if heads.stride(3) == 1 else heads.contiguous()


def _allocate_heads(heads: list[Tensor]) -> list[Tensor]:
    """Return room for tensors of one shape, in which a token has the heads of all of them side by side."""
    batch, num_heads, tokens, size = heads[0].shape
    room = heads[0].new_empty(batch, tokens, len(heads), num_heads, size)
    return [tensor.transpose(1, 2) for tensor in room.unbind(2)]
