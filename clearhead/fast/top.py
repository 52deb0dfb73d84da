"""The highest numbers of each row, with the log of the sum of its exponentials.

Legend: R rows, V numbers, K highest.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.fast.native.addresses import fits
from clearhead.fast.native.load import function


def top_and_log_total(
    x_RV: Float[Tensor, "rows numbers"], count: int
) -> tuple[Float[Tensor, "rows top"], Int[Tensor, "rows top"], Float[Tensor, " rows"]]:
    """Return the highest numbers of each row, their places, and log(sum(exp(row))), in one pass over each row.

    Args:
        x_RV: fp32 or bf16.
        count: how many, at most as many as a row has.

    Returns:
        fp32 numbers, highest first; int64 places, of equal numbers some order; fp32 logarithms. A row with a number
        that is none has such a logarithm.
    """
    kernel = function(f"top_{str(x_RV.dtype).removeprefix('torch.')}", pointers=4, numbers=4)
    if kernel is None or not fits(x_RV, x_RV.dtype, *x_RV.shape, by_row=True) or count > x_RV.shape[1]:
        x_RV = x_RV.float()
        return *x_RV.topk(count, dim=1), x_RV.logsumexp(1)
    rows, size = x_RV.shape
    values_RK = x_RV.new_empty(rows, count, dtype=torch.float32)
    places_RK = x_RV.new_empty(rows, count, dtype=torch.int64)
    log_totals_R = x_RV.new_empty(rows, dtype=torch.float32)
    tensors = (x_RV, values_RK, places_RK, log_totals_R)
    kernel(*(tensor.data_ptr() for tensor in tensors), rows, size, x_RV.stride(0), count)
    return values_RK, places_RK, log_totals_R
