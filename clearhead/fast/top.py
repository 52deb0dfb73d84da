"""The highest numbers of each row, with the log of the sum of its exponentials.

Legend: R rows, V numbers, K highest, X banned places.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.fast.native.addresses import address, fits
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
    places_RK = x_RV.new_empty(rows, count, dtype=torch.int64)
    log_totals_R = x_RV.new_empty(rows, dtype=torch.float32)
    banned = (None, 0) if banned_X is None else (address(banned_X, torch.int64, len(banned_X)), len(banned_X))
    found = (tensor.data_ptr() for tensor in (values_RK, places_RK, log_totals_R))
    kernel(x_RV.data_ptr(), banned[0], *found, rows, size, x_RV.stride(0), banned[1], count)
    return values_RK, places_RK, log_totals_R
