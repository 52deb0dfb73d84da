"""Addresses of tensors for kernels, which trust what lies there: dtype and sizes are checked where one is taken."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

_PLAIN: Final = (Tensor, nn.Parameter)


class Unfit(ValueError):
    """A tensor is not what a kernel reads there."""


def fits(tensor: Tensor, dtype: torch.dtype, *shape: int, by_row: bool = False) -> bool:
    """Return whether a tensor is what a kernel reads: on the CPU, of this dtype and shape, and contiguous.

    Args:
        tensor: any.
        dtype: its numbers.
        shape: its sizes.
        by_row: whether only the numbers of its last axis must lie side by side, where the kernel is given its strides.
    """
    # Subclasses, such as weights that are spread over processes, may have no address.
    if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.dtype != dtype or tensor.shape != shape:
        return False
    return tensor.is_contiguous() or (by_row and (shape[-1] == 1 or tensor.stride(-1) == 1))


def address(tensor: Tensor, dtype: torch.dtype, *shape: int, by_row: bool = False) -> int:
    """Return the address of a tensor that a kernel may read and write.

    Args:
        tensor, dtype, shape, by_row: as for `fits`; the tensor must live as long as the address is in use.

    Raises:
        Unfit: it is something else.
    """
    if not fits(tensor, dtype, *shape, by_row=by_row):
        raise Unfit(
            f"a kernel reads {dtype} {list(shape)}, and got {tensor.dtype} {list(tensor.shape)} with the strides "
            f"{list(tensor.stride())} on {tensor.device}"
        )
    return tensor.data_ptr()


def index_address(indices: Tensor, count: int, below: int) -> int:
    """Return the address of indices by which a kernel finds numbers in memory: int64, each from 0 to below a bound.

    Raises:
        Unfit: they are something else.
    """
    found = address(indices, torch.int64, count)
    least, most = (int(one) for one in indices.aminmax()) if count else (0, 0)
    if least < 0 or most >= below:
        raise Unfit(f"a kernel reads indices from 0 to {below - 1}, and got some from {least} to {most}")
    return found
