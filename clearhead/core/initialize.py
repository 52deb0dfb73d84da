"""Initialization of all weights of a model, drawn from torch's global generator."""

from __future__ import annotations

from typing import Any

from torch import nn

from clearhead import spec
from clearhead.core.norm import Norm
from clearhead.core.rare.mixture_of_experts import ExpertMaps

BRANCH_OUTPUTS = (".function.out.weight", ".function.down.weight", ".function.expert.down.weight")


def initialize(model: nn.Module, initialization: spec.Xavier | spec.Normal) -> None:
    """Draw all weights of a model and set biases to zero; norms and custom weights keep their values.

    Source: for `Xavier`, Glorot and Bengio 2010, eq. 16;
    for `Normal`, Radford et al. 2019, section 2.3: the last map of a branch is scaled by 1 / sqrt(number of branches).
    """
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if getattr(parameter, "is_made", False):
            continue  # a custom module has initialized it
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() < 2 or isinstance(owner, Norm):
            continue
        elif isinstance(initialization, spec.Normal):
            ends_branch = initialization.scale_branches and name.endswith(BRANCH_OUTPUTS)
            scale = _num_branches(model, name) ** -0.5 if ends_branch else 1.0
            nn.init.normal_(parameter, std=initialization.std * scale)
        elif isinstance(owner, nn.Linear | ExpertMaps):
            for weight in parameter if isinstance(owner, ExpertMaps) else (parameter,):
                nn.init.xavier_uniform_(weight)
        else:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)


def _num_branches(model: nn.Module, name: str) -> int:
    """Return the number of residual branches in the stack of a weight; shared layers count at each depth."""
    stack: Any = model.get_submodule(name.split(".")[0])
    return sum(len(step.branches) for index in stack.order for step in stack.layers[index].steps)
