"""Tokens drawn from logits in one call, without a sort of the vocabulary.

Legend: R rows, V numbers, X banned ids.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.fast.native.addresses import address, fits
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
        banned_X: ids that are never drawn, int64; some may be there twice, or be none of the row.
        divisor: of the logits.
        top_k: as of `TopK`; 0: all.
        top_p: as of `TopP`; 1: all.
        min_p: as of `MinP`; 0: all.

    Returns:
        int64, -1 where no id may be drawn; None where the compiled kernels do not serve the logits.
    """
    kernel = function(f"sample_{str(logits_RV.dtype).removeprefix('torch.')}", pointers=5, numbers=5)
    if kernel is None or not fits(logits_RV, logits_RV.dtype, *logits_RV.shape, by_row=True):
        return None
    rows, size = logits_RV.shape
    settings, uniform_R = torch.tensor([divisor, top_p, min_p], dtype=torch.float64), uniform_R.contiguous()
    tokens_R = torch.empty(rows, dtype=torch.int64)
    kernel(
        logits_RV.data_ptr(),
        address(banned_X, torch.int64, len(banned_X)),
        address(uniform_R, torch.float64, rows),
        settings.data_ptr(),
        tokens_R.data_ptr(),
        *(rows, size, logits_RV.stride(0), len(banned_X), top_k),
    )
    return tokens_R
