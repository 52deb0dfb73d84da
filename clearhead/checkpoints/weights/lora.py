"""LoRA: a linear layer is frozen, and two low-rank matrices beside it learn the difference.

outputs = x W^T + b + scale * dropout(x) A^T B^T, with A random and B zero, so that the first step computes what the
initial model does. Checkpoints of a run hold W, A and B; loading adds scale * B A to W.

Shape suffixes: R rank, I inputs, O outputs.

Source: arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.base.errors import InputError
from clearhead.base.printing import num_parameters
from clearhead.spec.addresses import nearest_address, select_addresses

DEFAULT_TARGETS = ("**.query", "**.key", "**.value", "**.function.out")
"""The projections of attention."""

_DOWN, _UP, _SCALE = "lora_down", "lora_up", "lora_scale"
LOW_RANK = (_DOWN, _UP, _SCALE)
"""Last names of the tensors that `adapt` adds to a linear layer."""


class AdaptedLinear(nn.Linear):
    """A frozen linear layer plus the trained product of two low-rank matrices.

    Args:
        linear: the layer; its tensors are shared, not copied.
        rank: of the low-rank matrices.
        scale: factor of the low-rank output.
        dropout: on its inputs.
    """

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float, dropout: float) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight: Tensor = linear.weight
        self.bias: nn.Parameter = linear.bias
        self.lora_down: nn.Parameter = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.lora_up: nn.Parameter = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        self.lora_scale: Tensor
        self.register_buffer(_SCALE, linear.weight.new_tensor(scale))
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        nn.init.kaiming_uniform_(self.lora_down, a=math.sqrt(5))

    def forward(self, x_I: Float[Tensor, "*axes inputs"]) -> Float[Tensor, "*axes outputs"]:
        """Return the sum of both outputs."""
        low_R = F.linear(self.dropout(x_I), self.lora_down)
        return F.linear(x_I, self.weight, self.bias) + self.lora_scale * F.linear(low_R, self.lora_up)


def adapt(
    module: nn.Module,
    *,
    rank: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    targets: Sequence[str] | None = None,
    new: Collection[str] = (),
) -> list[str]:
    """Add low-rank matrices to chosen linear layers of a module; only these and new tensors train.

    Args:
        module: changed in place.
        rank: of the low-rank matrices.
        alpha: their product is scaled by alpha / rank; None: 2 * rank.
        dropout: on the input of the low-rank path.
        targets: address patterns of linear layers; None: the projections of attention.
        new: addresses of tensors that the initial model lacks; they train in full.

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
        setattr(module.get_submodule(parent), leaf, adapted)
    return chosen


def _choose_layers(names: Sequence[str], targets: Sequence[str]) -> list[str]:
    matches_by_target = {target: select_addresses(target, names) for target in targets}
    empty = [target for target, matches in matches_by_target.items() if not matches]
    if empty:
        faults = [
            f"[lora] targets: '{target}' matches no linear layer of the model{nearest_address(target, names)}; an "
            f"address is '{names[0]}', where * can stand for a part and ** for any parts"
            for target in empty
        ]
        raise InputError.from_faults(faults, subject="[lora]")
    chosen = {name for matches in matches_by_target.values() for name in matches}
    return [name for name in names if name in chosen]


def merge_low_rank(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the low-rank matrices merged into the weights of their linear layers.

    Args:
        tensors: by address, as a run keeps them.

    Raises:
        InputError: one of them is missing, or they do not fit each other.
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
            raise InputError(f"'{address}' has low-rank matrices of the shapes {shapes[0]} and {shapes[1]}")
        change_OI = up.double() @ down.double()
        result[f"{address}.weight"] = (weight_OI.double() + float(scale) * change_OI).to(weight_OI.dtype)
    return result


def describe_adaptation(module: nn.Module, chosen: Sequence[str]) -> str:
    """Return in words how much of a module trains."""
    trained = num_parameters(module, only_trained=True)
    return f"LoRA beside {len(chosen)} linear maps: {trained:,} of {num_parameters(module):,} numbers train"
