"""Tokens drawn from logits in one call, without a sort of the vocabulary.

Legend: R rows, V numbers, X banned ids.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.fast.native.load import function


def draw_tokens(
    logits_RV: Float[Tensor, "rows numbers"],
    uniform_R: Float[Tensor, " rows"],
    banned_X: Int[Tensor, " banned"],
    *,
    divisor: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> Int[Tensor, " rows"] | None:
    """Return an id for each row: what the processors of these names keep, by inverting its cumulative distribution.

    Of equal logits at the border of `top_p` those with the higher ids stay.

    Args:
        logits_RV: fp32 or bf16.
        uniform_R: uniform random numbers, fp64, from 0 to below 1.
        banned_X: ids that are never drawn, int64; some may be there twice.
        divisor: of the logits.
        top_k: as of `TopK`; 0: all.
        top_p: as of `TopP`; 1: all.
        min_p: as of `MinP`; 0: all.

    Returns:
        int64, -1 where no id may be drawn; None where the compiled kernels do not serve the logits.
    """
    kernel = function(f"sample_{str(logits_RV.dtype).removeprefix('torch.')}", pointers=5, numbers=5)
    if kernel is None or logits_RV.device.type != "cpu" or logits_RV.stride(1) != 1:
        return None
    rows, size = logits_RV.shape
    settings = torch.tensor([divisor, top_p, min_p], dtype=torch.float64)
    tokens_R = banned_X.new_empty(rows)
    tensors = logits_RV, banned_X, uniform_R.contiguous(), settings, tokens_R
    kernel(*(one.data_ptr() for one in tensors), rows, size, logits_RV.stride(0), len(banned_X), top_k)
    return tokens_R
