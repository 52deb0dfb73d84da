"""The layers of a stack in one compiled call: the structures that it reads, as in stack.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.fast.native.addresses import address
from clearhead.fast.native.build import function

Weights = Literal["float32", "mixed", "int8"]
"""fp32; bf16, with rows rounded to bf16; or 8 bits, with rows rounded to 8 bits. Sums are fp32 or exact."""
RunStack = Callable[[Float[Tensor, "rows width"], Sequence["Keys"]], None]


class Norm(ctypes.Structure):
    """A norm over the last axis; kind 0: none."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("kind", ctypes.c_int32),
    )


class Matrix(ctypes.Structure):
    """The matrix of a linear layer [outputs, inputs], its bias, and in 8 bits the scales of its outputs.

    With a turned_stride above 0 it lies the other way round, in fp32: [inputs, outputs], rows so many numbers apart.
    """

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("turned_stride", ctypes.c_int64),
    )


class Branch(ctypes.Structure):
    """A branch of a residual step: a feed-forward network, or attention."""

    _fields_ = (
        *((name, Norm) for name in ("shared", "pre", "post", "out")),
        *((name, Matrix) for name in ("first", "second", "third", "last")),
        *((name, Norm) for name in ("query_norm", "key_norm")),
        ("sink", ctypes.c_void_p),
        *((name, ctypes.c_float) for name in ("scale", "score_scale", "soft_cap")),
        *((name, ctypes.c_int32) for name in ("function", "activation", "heads", "kv_heads", "head_size")),
        *((name, ctypes.c_int32) for name in ("is_first", "is_last", "norms_after_rotation")),
    )


class Keys(ctypes.Structure):
    """The keys and values of an attention in one call."""

    place: tuple[int, Tensor, Tensor | None] | None = None
    """The first row, the buffer and its scales that the addresses are of."""

    _fields_ = (
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row_stride", "head_stride", "key_stride", "count")),
        ("starts", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("groups", "rows_per_group", "before", "after")),
        ("origin", ctypes.c_void_p),
        ("origin_stride", ctypes.c_int64),
        ("mask", ctypes.c_void_p),
        ("mask_stride", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("bias_row_stride", "bias_head_stride")),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("angle_stride", "half", "kind")),
        *((name, ctypes.c_void_p) for name in ("key_scales", "value_scales")),
        ("has_cache", ctypes.c_int64),
    )


def stack_runner(weights: Weights, branches: Sequence[Branch], width: int) -> RunStack | None:
    """Return a function that runs branches one after the other.

    Args:
        weights: of all matrices of the branches.
        branches: their addresses must stay valid while the function is in use.
        width: of the rows.

    Returns:
        A function of fp32 activations, contiguous, which it changes in place, and of the keys of each branch. None
        where there are no compiled kernels.
    """
    kernel = function(f"stack_{weights}", pointers=3, numbers=3)
    if kernel is None:
        return None
    count = len(branches)
    of_branches, of_keys = (Branch * count)(*branches), (Keys * count)

    def run(x_MD: Tensor, keys: Sequence[Keys]) -> None:
        listed = of_keys(*keys)
        x = address(x_MD, torch.float32, len(x_MD), width)
        kernel(x, ctypes.addressof(of_branches), ctypes.addressof(listed), count, len(x_MD), width)

    return run


def has_squares() -> bool:
    """Return whether the compiled kernels multiply many rows as squares, which takes AMX or AVX-512 for bf16."""
    kernel, are_there = function("find_squares", pointers=1, numbers=0), ctypes.c_int64()
    if kernel is not None:
        kernel(ctypes.addressof(are_there))
    return bool(are_there.value)
