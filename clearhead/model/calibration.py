"""Calibration of a model in int4: choice of the matrices that stay in 8 bits, measured on a text.

Matrices with a large relative error of their outputs stay in 8 bits. The squared inputs of a matrix on the text weight
the error of each column.

Legend: N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.base.errors import InputError
from clearhead.checkpoints.weights.files import build_from_tensors
from clearhead.core import build
from clearhead.fast.stored import (
    INT4,
    LEAST_SHARE_IN_4_BITS,
    StorageFormat,
    WeightPlan,
    choose_int4,
    count_int4,
    widen_weights,
)
from clearhead.model.facade import Model

MOST_LOSS: Final = 0.01
"""Loss in nats per label that int4 may add; calibration stops below it. It is 1 % of the perplexity."""
_NUM_TRIALS: Final = 4
"""Number of steps in which matrices move to 8 bits, up to the largest share of weights in 8 bits."""

Powers = dict[str, Float[Tensor, " columns"]]
"""Sums of squared inputs per column, by the address of a linear layer."""


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration: the model in int4, and its losses.

    Args:
        model: the model, with some matrices in 8 bits.
        exact_loss: the loss of the original weights on the text, in nats per label.
        first_loss: the loss with 4 bits in every matrix that can have them, in nats per label.
        loss: the loss of the model, in nats per label.
        num_in_8_bits: the number of linear layers that calibration moved to 8 bits.
        num_matrices: the number of linear layers that can have 4 bits.
    """

    model: Model
    exact_loss: float
    first_loss: float
    loss: float
    num_in_8_bits: int
    num_matrices: int

    def lines(self) -> Iterator[str]:
        """Yield the lines of the result for the terminal."""
        yield f"loss on the text: {self.exact_loss:.4f} with the original weights, {self.first_loss:.4f} in int4"
        if self.num_in_8_bits:
            yield f"{self.num_in_8_bits} of {self.num_matrices} matrices stay in 8 bits: loss {self.loss:.4f}"
        else:
            yield f"none of {self.num_matrices} matrices stays in 8 bits"


def calibrate(model: Model, text: Path) -> Calibration:
    """Return a model in int4 in which the matrices with the largest errors on a text stay in 8 bits.

    Args:
        model: a language model with its original weights, which do not change.
        text: a file of texts, same as in `clearhead evaluate --text`.

    Raises:
        InputError: the text cannot be used, the model does not predict text, or it cannot be quantized to int4.
    """
    plain = build(model.spec, device="meta")
    formats = choose_int4(plain)
    candidates = [address for address, kind in formats.items() if kind == INT4]
    with _sum_squares(model.module, candidates) as powers:
        exact_loss = _measure_loss(model, text)
    order = sorted(candidates, key=lambda address: -_relative_error(model.module, address, powers))
    sizes = {address: plain.get_parameter(f"{address}.weight").numel() for address in candidates}
    in_4_bits, total = count_int4(plain, formats)
    budget = in_4_bits - LEAST_SHARE_IN_4_BITS * total
    trials: dict[int, float] = {}
    result = model
    for trial in range(_NUM_TRIALS + 1):
        count = _count_within(order, sizes, budget * trial / _NUM_TRIALS)
        if count in trials:
            continue
        result = _quantize(model, choose_int4(plain, order[:count]))
        trials[count] = _measure_loss(result, text)
        if trials[count] <= exact_loss + MOST_LOSS:
            break
    best = min(trials, key=lambda count: (trials[count] > exact_loss + MOST_LOSS, trials[count]))
    if best != max(trials):
        result = _quantize(model, choose_int4(plain, order[:best]))
    return Calibration(result, exact_loss, trials[0], trials[best], best, len(candidates))


def _measure_loss(model: Model, text: Path) -> float:
    measures = model.evaluate({"text": str(text)})
    loss = measures.get("loss")
    if not isinstance(loss, float):
        raise InputError(f"--text needs a model that predicts text; the task of this model is {model.task.kind}")
    return loss


@contextmanager
def _sum_squares(module: nn.Module, addresses: list[str]) -> Iterator[Powers]:
    """Context manager that sums the squared inputs of linear layers while the model runs, and yields these sums."""
    powers: Powers = {}
    handles = []
    for address in addresses:

        def add(_: nn.Module, inputs: tuple[Tensor, ...], address: str = address) -> None:
            squares_K = inputs[0].detach().flatten(0, -2).double().square().sum(0)
            powers[address] = powers[address] + squares_K if address in powers else squares_K

        handles.append(module.get_submodule(address).register_forward_pre_hook(add))
    try:
        yield powers
    finally:
        for handle in handles:
            handle.remove()


def _relative_error(module: nn.Module, address: str, powers: Powers) -> float:
    """Return the energy of the error that 4 bits make in a matrix's outputs, divided by the energy of the outputs."""
    weight_NK = module.get_submodule(address).weight
    assert isinstance(weight_NK, Tensor)
    weight_NK = weight_NK.detach().float()
    error_NK = INT4.widen(*INT4.encode(weight_NK)) - weight_NK
    powers_K = powers.get(address, weight_NK.new_ones(weight_NK.shape[1])).float()
    energy = float((weight_NK.square() @ powers_K).sum())
    return float((error_NK.square() @ powers_K).sum()) / energy if energy > 0.0 else 0.0


def _count_within(order: list[str], sizes: dict[str, int], budget: float) -> int:
    """Return the number of matrices from the start of `order` that together have at most `budget` weights."""
    count, used = 0, 0
    while count < len(order) and used + sizes[order[count]] <= budget:
        used += sizes[order[count]]
        count += 1
    return count


def _quantize(model: Model, formats: dict[str, StorageFormat]) -> Model:
    """Return a copy of a model with matrices in the given formats."""
    plan = WeightPlan(torch.float32, formats)
    state: dict[str, Tensor] = {}
    for address, tensor in widen_weights(model.module.state_dict()):
        state |= plan.hold(address, tensor)
    return model.with_module(build_from_tensors(model.spec, state))
