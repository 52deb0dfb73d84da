"""LoRA: a linear layer is frozen, and two low-rank matrices learn the difference.

    outputs = x W^T + b + scale * dropout(x) A^T B^T.

A begins with random numbers and B with zeros, so the first step computes the same as the initial model. Checkpoints of
a run contain W, A and B. Loading adds scale * B A to W.

Shape suffixes: R rank, I inputs, O outputs.

Source: arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.base.errors import InputError
from clearhead.base.printing import human_bytes, num_parameters
from clearhead.fast.replica import override
from clearhead.fast.stored import Stored
from clearhead.fast.training.frozen import find_stored_weight, multiply_frozen
from clearhead.spec.addresses import nearest_address, select_addresses

DEFAULT_TARGETS = ("**.query", "**.key", "**.value", "**.function.out")
"""Address patterns of the projections of attention, which are adapted by default."""

_DOWN, _UP, _SCALE = "lora_down", "lora_up", "lora_scale"
LOW_RANK = (_DOWN, _UP, _SCALE)
"""Last names of the tensors that `adapt` adds to a linear layer."""


class AdaptedLinear(nn.Linear):
    """A frozen linear layer plus the trained product of two low-rank matrices.

    Args:
        linear: the frozen layer; its tensors are shared, not copied. A weight that is stored in 16 bits stays so.
        rank: the rank of the low-rank matrices.
        scale: the factor on the low-rank output.
        dropout: the dropout rate on the low-rank input.
    """

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float, dropout: float) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        weight = find_stored_weight(linear)
        self.weight: Tensor = linear.weight if weight is None else weight
        self.bias: nn.Parameter = linear.bias
        options: Any = {"dtype": torch.promote_types(self.weight.dtype, torch.float32), "device": self.weight.device}
        self.lora_down: nn.Parameter = nn.Parameter(torch.empty(rank, linear.in_features, **options))
        self.lora_up: nn.Parameter = nn.Parameter(torch.zeros(linear.out_features, rank, **options))
        self.lora_scale: Tensor
        self.register_buffer(_SCALE, torch.tensor(scale, **options))
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        nn.init.kaiming_uniform_(self.lora_down, a=math.sqrt(5))

    def forward(self, x_I: Float[Tensor, "*axes inputs"]) -> Float[Tensor, "*axes outputs"]:
        """Return the sum of the frozen and the low-rank output."""
        low_R = F.linear(self.dropout(x_I), self.lora_down)
        weight_OI = find_stored_weight(self)
        if weight_OI is None:
            frozen_O = F.linear(x_I, self.weight, self.bias)
        else:
            frozen_O = multiply_frozen(x_I, weight_OI, self.bias)
        return frozen_O + self.lora_scale * F.linear(low_R, self.lora_up)


def adapt(
    module: nn.Module,
    *,
    rank: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: Sequence[str] | None = None,
    new: Collection[str] = (),
) -> list[str]:
    """Add low-rank matrices to linear layers of a module; only these matrices and the tensors of `new` are trained.

    Args:
        module: the module, changed in place.
        rank: the rank of the low-rank matrices.
        alpha: the product of the matrices is scaled by alpha / rank. None means 2 * rank.
        dropout: the dropout rate on the low-rank input.
        targets: address patterns of linear layers. None means the projections of attention.
        new: the addresses of tensors that the initial model lacks; these tensors train in full.

    Returns:
        The addresses of the adapted layers.

    Raises:
        InputError: a target matches no linear layer; the nearest addresses are named.
    """
    linears = {name: child for name, child in module.named_modules() if isinstance(child, nn.Linear)}
    chosen = _choose_layers(list(linears), targets or DEFAULT_TARGETS)
    scale = 2.0 if alpha is None else alpha / rank
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in new)
    for address in chosen:
        parent, _, leaf = address.rpartition(".")
        adapted = AdaptedLinear(linears[address], rank=rank, scale=scale, dropout=dropout)
        linear: nn.Module = linears[address]
        if isinstance(linear, Stored):
            override(adapted, Stored).format = linear.format
        setattr(module.get_submodule(parent), leaf, adapted)
    return chosen


def _choose_layers(names: Sequence[str], targets: Sequence[str]) -> list[str]:
    matches_by_target = {target: select_addresses(target, names) for target in targets}
    empty = [target for target, matches in matches_by_target.items() if not matches]
    if empty:
        faults = [
            f"[lora] targets: '{target}' matches no linear layer of the model{nearest_address(target, names)}; an "
            f"address is '{names[0]}', in which * replaces one name and ** any number of names"
            for target in empty
        ]
        raise InputError.from_faults(faults, subject="[lora]")
    chosen = {name for matches in matches_by_target.values() for name in matches}
    return [name for name in names if name in chosen]


def merge_low_rank(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the low-rank matrices merged into the weights of their linear layers.

    A merged weight is fp32 if the frozen weight has 16 bits, since 16 bits would round the low-rank update away.

    Args:
        tensors: the tensors of a run's checkpoint, by address.

    Raises:
        InputError: a low-rank matrix, scale or weight is missing, or shapes do not fit each other.
    """
    adapted = dict.fromkeys(name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in LOW_RANK)
    result = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in LOW_RANK}
    for address in adapted:
        down, up, scale, weight_OI = (tensors.get(f"{address}.{leaf}") for leaf in (*LOW_RANK, "weight"))
        if down is None or up is None or scale is None or weight_OI is None:
            raise InputError(f"'{address}' has low-rank matrices, but not all of {', '.join(LOW_RANK)} and weight")
        shapes = [list(tensor.shape) for tensor in (up, down, weight_OI)]
        if (
            scale.numel() != 1
            or any(len(shape) != 2 for shape in shapes)
            or shapes != [[shapes[2][0], shapes[1][0]], [shapes[1][0], shapes[2][1]], shapes[2]]
        ):
            raise InputError(
                f"'{address}' has low-rank matrices of the shapes {shapes[0]} and {shapes[1]}, which do not fit its "
                "weight"
            )
        change_OI = up.double() @ down.double()
        dtype = torch.promote_types(weight_OI.dtype, torch.float32)
        result[f"{address}.weight"] = (weight_OI.double() + float(scale) * change_OI).to(dtype)
    return result


def find_merged_dtypes(tensors: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor by address, after the low-rank matrices among them are merged.

    Args:
        tensors: the tensors of a run's checkpoint by address; they may be on the meta device.
    """
    adapted = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in LOW_RANK}
    return {
        name: torch.promote_types(tensor.dtype, torch.float32) if name.rpartition(".")[0] in adapted else tensor.dtype
        for name, tensor in tensors.items()
    }


def describe_adaptation(module: nn.Module, chosen: Sequence[str]) -> str:
    """Return a line about the adapted layers, the share of parameters that train, and the weights in 16 bits."""
    trained = num_parameters(module, only_trained=True)
    line = f"LoRA in {len(chosen)} linear layers: {trained:,} of {num_parameters(module):,} parameters train"
    in_16_bits = sum(0 if (weight := find_stored_weight(each)) is None else weight.nbytes for each in module.modules())
    if in_16_bits:
        line += (
            f"; {human_bytes(in_16_bits)} of frozen weights stay in 16 bits, and a step in fp32 widens one matrix at a "
            "time"
        )
    return line
