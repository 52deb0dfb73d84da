"""Muon's update of matrices by CPU kernels: from gradient and momentum to the new weights in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.fast.native.abi import MuonCall, MuonMatrix, address
from clearhead.fast.training.linear import BLOCK, has_products, run

Matrix = Float[Tensor, "rows columns"]


@dataclass(frozen=True)
class Update:
    """Settings of Muon's update, which all matrices share.

    Attributes:
        factors: factors of the polynomial of a Newton-Schulz step: a x + b (x x^T) x + c (x x^T)^2 x.
        steps: number of Newton-Schulz steps.
        momentum: factor of the old momentum in a step.
        weight_factor: factor of the old weights, from the weight decay.
    """

    factors: tuple[float, float, float]
    steps: int
    momentum: float
    weight_factor: float


def is_served(parameter: Tensor) -> bool:
    """Return whether the kernel supports a parameter: an unsharded fp32 matrix whose sizes are multiples of `BLOCK`."""
    tensors = parameter, parameter.grad
    is_plain = all(
        tensor is not None and tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
        for tensor in tensors
    )
    is_whole = not hasattr(parameter, "placements")
    return is_plain and is_whole and not any(size % BLOCK for size in parameter.shape) and has_products()


def update_matrices(
    parameters: Sequence[Matrix], momenta: Sequence[Matrix], rates: Sequence[float], update: Update
) -> None:
    """Move momenta towards the gradients, and parameters against their orthogonal updates.

    Args:
        parameters: matrices that `is_served` accepts.
        momenta: momentum of each parameter.
        rates: factor of the orthogonal update of each parameter.
        update: settings of the update.
    """
    matrices = (MuonMatrix * len(parameters))(
        *(
            MuonMatrix(
                *(address(tensor, torch.float32, *parameter.shape) for tensor in (parameter, momentum, parameter.grad)),
                *parameter.shape,
                rate,
            )
            for parameter, momentum, rate in zip(parameters, momenta, rates, strict=True)
            if parameter.grad is not None
        )
    )
    factors = (ctypes.c_float * 3)(*update.factors)
    run(
        "muon",
        MuonCall(
            ctypes.addressof(matrices),
            len(matrices),
            update.steps,
            factors,
            1.0 - update.momentum,
            update.weight_factor,
        ),
    )
