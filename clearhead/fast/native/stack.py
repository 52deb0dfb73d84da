"""The layers of a stack in one compiled call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.fast.native.abi import Branch, Keys, StackCall, values
from clearhead.fast.native.addresses import address
from clearhead.fast.native.load import function

Weights = Literal["float32", "mixed", "int8"]
"""fp32; bf16, with rows rounded to bf16; or 8 bits, with rows rounded to 8 bits. Sums are fp32 or exact."""
RunStack = Callable[[Float[Tensor, "rows width"], Sequence[Keys]], None]


def stack_runner(weights: Weights, branches: Sequence[Branch], width: int) -> RunStack | None:
    """Return a function that runs branches one after the other.

    Args:
        weights: of all matrices of the branches.
        branches: their addresses must stay valid while the function is in use.
        width: of the rows.

    Returns:
        A function of fp32 activations, contiguous, which it changes in place, and of the keys of each branch. None
        where there are no compiled kernels for such weights.
    """
    kernel = function("stack", pointers=1)
    if kernel is None or (weights == "int8" and function("linear_int8", pointers=5, numbers=3) is None):
        return None
    count, kind = len(branches), values("WeightKind")[weights]
    of_branches = (Branch * count)(*branches)

    def run(x_MD: Tensor, keys: Sequence[Keys]) -> None:
        listed = (Keys * count)(*keys)
        x = address(x_MD, torch.float32, len(x_MD), width)
        call = StackCall(x, ctypes.addressof(of_branches), ctypes.addressof(listed), count)
        call.M, call.D, call.weight_kind, call.most_threads = len(x_MD), width, kind, torch.get_num_threads()
        kernel(ctypes.addressof(call))

    return run
