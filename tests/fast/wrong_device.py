"""A device that computes one operation wrong, as public reports describe it: the CPU under a dispatch mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
OPERATIONS = {
    "fused attention": aten.scaled_dot_product_attention.default,
    "eager attention": aten.matmul.default,
    "matrix products": aten.linear.default,
    "softmax": aten.softmax.int,
    "layer norm": aten.layer_norm.default,
    "RMS norm": aten.rms_norm.default,
    "embedding lookups": aten.embedding.default,
    "sampling": aten.topk.default,
}
"""An operation of PyTorch that each operation of the check alone rests on, or rests on first."""
Call = Callable[..., Any]
Fault = Callable[..., Any]
"""Receives the right function and its arguments."""


class WrongDevice(TorchDispatchMode):
    """Computes one operation wrong in some dtypes.

    Args:
        operation: a key of `OPERATIONS`.
        fault: computes the operation.
        dtypes: of the inputs for which it is wrong.
    """

    def __init__(self, operation: str, fault: Fault, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.fault, self.target, self.dtypes = fault, OPERATIONS[operation], dtypes or (torch.bfloat16,)
        self.calls = 0
        """How often the operation ran, right or wrong."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not self.target:
            return func(*args, **kwargs)
        self.calls += 1
        if args[0].dtype not in self.dtypes:
            return func(*args, **kwargs)
        return self.fault(func, *args, **kwargs)


def mask_by_fours(
    right: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0,
    is_causal: bool = False, **named: Any,
) -> Tensor:  # fmt: skip
    """Apply the causal mask once for each group of four queries."""
    if is_causal:
        rows = torch.arange(query.shape[2])[:, None]
        mask = torch.arange(key.shape[2]) <= rows // 4 * 4 + 3
    return right(query, key, value, mask, dropout, False, **named)


def read_past_the_end(
    right: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *rest: Any, **named: Any
) -> Tensor:
    """Attend to garbage after the last key, up to a multiple of 32."""
    surplus = -key.shape[2] % 32 if mask is None and not any(rest) and query.shape[2] <= 8 else 0
    key, value = (F.pad(x, (0, 0, 0, surplus), value=0.5) for x in (key, value))
    return right(query, key, value, mask, *rest, **named)


def ignore_the_last_key(
    right: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *rest: Any, **named: Any
) -> Tensor:
    """Attend to all keys but the last."""
    visible = slice(max(1, key.shape[2] - 1))
    mask = None if mask is None else mask[..., visible]
    return right(query, key[:, :, visible], value[:, :, visible], mask, *rest, **named)


def ignore_strides(right: Call, *args: Any, **named: Any) -> Any:
    """Read views as if their numbers stood one after the other."""
    return right(*(_as_contiguous(x) if isinstance(x, Tensor) else x for x in args), **named)


def _as_contiguous(x: Tensor) -> Tensor:
    strides = [math.prod(x.shape[axis + 1 :]) for axis in range(x.ndim)]
    return x.as_strided(x.shape, strides, x.storage_offset())


def move_one_element(right: Call, *args: Any, **named: Any) -> Any:
    """Make one element 5 % too large."""
    output = right(*args, **named).clone(memory_format=torch.contiguous_format)
    output.view(-1)[output.numel() // 3] *= 1.05
    return output


def stop_at_512(right: Call, *args: Any, **named: Any) -> Any:
    """Read only 512 keys, or numbers of a row."""
    first, *rest = args
    if isinstance(rest[0], Tensor):
        return right(first, *(x[:, :, :512] if isinstance(x, Tensor) else x for x in rest), **named)
    return F.pad(right(first[..., :512], *rest, **named), (0, max(0, first.shape[-1] - 512)))


class EverySecondCall:
    """Shifts the output of every second call by one."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, right: Call, *args: Any, **named: Any) -> Any:
        """Compute, and shift the output if the number of the call is even."""
        self.calls += 1
        output = right(*args, **named)
        is_wrong = self.calls % 2 == 0
        if isinstance(output, tuple):  # values and ids of a selection
            return tuple(x.roll(1, -1) for x in output) if is_wrong else output
        return output.roll(1, -1) if is_wrong else output
