"""Fused attention kernel, and the choice between it and the eager kernel.

Legend: B batch, T queries, S keys, H heads, K key/value heads, E head size.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from clearhead import spec

Queries = Float[Tensor, "batch heads queries head_size"]
Keys = Float[Tensor, "batch kv_heads keys head_size"]
Bias = Float[Tensor, "#batch heads queries keys"]
Kernel = tuple[Literal["eager", "fused"], str]  # and the reason

# Up to this many tokens, a batch of small matrix products beats a CPU's fused kernel, forward and backward.
SHORT_ON_CPU = 64


def eager_is_better(query_BHTE: Queries, key_BKSE: Keys, bias: Bias | None) -> bool:
    """Return whether the eager kernel is better: for short sequences on a CPU, or for a bias that needs gradients."""
    # On a CPU alone. torch.compile would make a graph for each answer about lengths.
    is_plain = query_BHTE.device.type == "cpu" and not torch.compiler.is_compiling()
    is_short = is_plain and query_BHTE.shape[2] > 1 and max(query_BHTE.shape[2], key_BKSE.shape[2]) <= SHORT_ON_CPU
    return is_short or (bias is not None and bias.requires_grad)


def choose_kernel(
    attention: spec.Attention, dropout: float, is_training: bool, is_watched: bool, eager_reason: str
) -> Kernel:
    """Return the kernel of an attention, "fused" or "eager", for long sequences, and the reason in words."""
    if eager_reason:
        return "eager", eager_reason
    if is_watched:
        return "eager", "scores or weights are captured"
    if attention.soft_cap is not None or attention.sink:
        return "eager", f"the fused kernel has no {'sink' if attention.sink else 'soft cap'}"
    if attention.score_step is not None or attention.weight_step is not None:
        return "eager", "a custom step computes its scores or weights"
    if is_training and dropout > 0.0:
        return "eager", "the fused kernel has no attention dropout on a CPU"
    if is_training and not isinstance(attention.score_bias, spec.Alibi | None):
        return "eager", "the fused kernel has no trainable score bias on a CPU"
    return "fused", f"no attention weights are needed; on a CPU, the eager kernel runs up to {SHORT_ON_CPU} tokens"


def fused_attention(
    query_BHTE: Queries, key_BKSE: Keys, value_BKSE: Keys, mask: Bool[Tensor, "#batch #heads #queries keys"] | None,
    bias: Bias | None = None, *, scale: float, is_causal: bool = False, dropout: float = 0.0,
) -> Queries:  # fmt: skip
    """Return softmax(query key^T * scale + bias) value by PyTorch's fused kernel, which never stores the weights.

    Args:
        query_BHTE, key_BKSE, value_BKSE: queries, keys and values; several query heads may share a key/value head.
        mask: True = may attend; None means no mask.
        bias: bias added to the scores; None means no bias.
        scale: factor on the products of queries and keys.
        is_causal: True = a causal mask, which is not stored and halves the work.
        dropout: probability that a weight is dropped; above 0 on a GPU only.

    Source: arXiv 2205.14135, algorithm 1.
    """
    # The kernel does not check the dtype of the bias, and reads one dtype as the other.
    allowed: Tensor | None = mask if bias is None else bias.to(query_BHTE.dtype)
    if bias is not None and mask is not None:
        allowed = bias.to(query_BHTE.dtype).masked_fill(~mask, float("-inf"))
    groups, folds, is_on_gpu = query_BHTE.shape[1] // key_BKSE.shape[1], False, query_BHTE.device.type != "cpu"
    if is_on_gpu and allowed is not None and allowed.stride(-1) != 1:
        allowed = allowed.contiguous()  # a GPU's fast kernels need the keys of a query side by side
    if is_on_gpu and groups > 1 and (allowed is not None or value_BKSE.dtype == torch.float32):
        # A GPU's fast kernels know no shared heads with a mask or in fp32. The heads of one query become its queries.
        if folds := query_BHTE.shape[2] == 1 and not is_causal:
            query_BHTE = query_BHTE.unflatten(1, (-1, groups)).flatten(2, 3)
            if allowed is not None and allowed.shape[1] > 1:
                allowed = allowed.unflatten(1, (-1, groups)).flatten(2, 3)
        else:
            key_BKSE, value_BKSE = (x_BKSE.repeat_interleave(groups, 1) for x_BKSE in (key_BKSE, value_BKSE))
    mixed = F.scaled_dot_product_attention(
        query_BHTE, key_BKSE, value_BKSE, allowed, dropout, is_causal, scale=scale,
        enable_gqa=True if query_BHTE.shape[1] != key_BKSE.shape[1] else False,  # noqa: SIM210 - bool() keeps a symbol
    )  # fmt: skip
    return mixed.unflatten(2, (groups, -1)).flatten(1, 2) if folds else mixed
