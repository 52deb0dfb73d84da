"""Kernels on rows of logits: highest numbers, log of the sum of exponentials, and tokens drawn without a sort.

Legend: R rows, V numbers, K highest, X banned ids.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.fast.native.abi import address, fits
from clearhead.fast.native.load import function


def top_and_log_total(
    x_RV: Float[Tensor, "rows numbers"], count: int, banned_X: Int[Tensor, " banned"] | None = None
) -> tuple[Float[Tensor, "rows top"], Int[Tensor, "rows top"], Float[Tensor, " rows"]]:
    """Return the highest numbers of each row, their places, and log(sum(exp(row))), in one pass over each row.

    Args:
        x_RV: fp32 or bf16; others are computed in their own precision, in fp32 at least.
        count: how many, at most as many as a row has.
        banned_X: int64 places that count as -infinity among the highest; the sum is of all numbers. None: none.

    Returns:
        The numbers, highest first; int64 places, of equal numbers some order; logarithms. Numbers and logarithms are
        fp32, or fp64 of fp64. A row with a number that is none has such a logarithm.
    """
    kernel = function(f"top_{str(x_RV.dtype).removeprefix('torch.')}", pointers=5, numbers=5)
    if kernel is None or not fits(x_RV, x_RV.dtype, *x_RV.shape, by_row=True) or count > x_RV.shape[1]:
        x_RV = x_RV.to(torch.promote_types(x_RV.dtype, torch.float32))
        allowed_RV = x_RV if banned_X is None else x_RV.index_fill(1, banned_X, -torch.inf)
        return *allowed_RV.topk(count, dim=1), x_RV.logsumexp(1)
    rows, size = x_RV.shape
    values_RK = x_RV.new_empty(rows, count, dtype=torch.float32)
    indices_RK = x_RV.new_empty(rows, count, dtype=torch.int64)
    log_totals_R = x_RV.new_empty(rows, dtype=torch.float32)
    banned = (None, 0) if banned_X is None else (address(banned_X, torch.int64, len(banned_X)), len(banned_X))
    addresses = (tensor.data_ptr() for tensor in (values_RK, indices_RK, log_totals_R))
    kernel(x_RV.data_ptr(), banned[0], *addresses, rows, size, x_RV.stride(0), banned[1], count)
    return values_RK, indices_RK, log_totals_R


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
