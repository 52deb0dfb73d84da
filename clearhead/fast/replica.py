"""Replicas: other trees of modules over the same parameters, some of whose parts have classes of their own.

The tree that a user holds is never touched: what computes faster, or what a call wants for itself (evaluation mode,
hooks), is a replica. PyTorch replicates modules for several devices in the same way (`torch.nn.parallel.replicate`).
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from clearhead.base.errors import RunFailure
from clearhead.base.hooks import active_hooks
from clearhead.base.tied import Tied

ModuleT = TypeVar("ModuleT", bound=nn.Module)
PartT = TypeVar("PartT", bound=nn.Module)


def replica(module: ModuleT, *, is_training: bool = False) -> ModuleT:
    """Return another tree over the parameters and buffers of a module, whose dictionaries the two share.

    Parts that occur several times do so in the replica. Hooks that run in the calling context are those of the replica
    too; what is registered or removed later concerns one tree alone.

    Args:
        module: is not changed.
        is_training: the mode of the replica, whatever that of the module is.
    """
    twins = {original: _twin(original, is_training) for original in module.modules()}
    for original, twin in twins.items():
        state = vars(twin)
        state["_modules"] = {name: None if child is None else twins[child] for name, child in original._modules.items()}
        # A tuple holds modules that belong to another one, such as the table that an output layer is tied to.
        for name, value in vars(original).items():
            if isinstance(value, Tied):
                state[name] = Tied(twins.get(value.module, value.module))
            elif isinstance(value, tuple) and any(isinstance(item, nn.Module) for item in value):
                state[name] = tuple(twins.get(item, item) for item in value)
    replica_of_module = twins[module]
    assert isinstance(replica_of_module, type(module))
    return replica_of_module


def override(part: nn.Module, mixin: type[PartT]) -> PartT:
    """Put a class before that of a part of a replica: its methods override those of the part, which `super()` has."""
    part.__class__ = cast("type[PartT]", _with_mixin(type(part), mixin))  # type: ignore[arg-type]
    assert isinstance(part, mixin)
    return part


def plain_type(part: nn.Module) -> type[nn.Module]:
    """Return the class that a part has in the plain tree."""
    found: type[nn.Module] = getattr(type(part), "plain", type(part))
    return found


def converted(module: ModuleT, dtype: torch.dtype) -> ModuleT:
    """Return a replica with weights of its own, in another dtype; matrices of integers stay as they are."""
    made, known = replica(module), dict[int, Tensor]()

    def convert(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point():
            return tensor
        if id(tensor) not in known:
            copied = tensor.detach().to(dtype)
            known[id(tensor)] = nn.Parameter(copied, False) if isinstance(tensor, nn.Parameter) else copied
        return known[id(tensor)]

    for part in made.modules():
        if "weight" in part._parameters:
            part.__class__ = plain_type(part)  # a matrix in 16 bits is widened by its class
        for kind in ("_parameters", "_buffers"):
            vars(part)[kind] = {name: convert(tensor) for name, tensor in vars(part)[kind].items()}
    return made


def in_evaluation(module: ModuleT) -> ModuleT:
    """Return a tree in evaluation mode: the module itself, or a replica where some of its parts are in training."""
    return replica(module) if any(part.training for part in module.modules()) else module


def refuse_to_run(module: nn.Module, why: str) -> None:
    """Refuse calls of a module, and of each of its parts, whose replica has taken its place.

    Args:
        module: of which only the weights are read from now on.
        why: ends the message.
    """

    def refuse(*_: object) -> None:
        raise RunFailure(f"this module cannot run: {why}")

    for part in module.modules():
        part.register_forward_pre_hook(refuse)


def _twin(part: nn.Module, is_training: bool) -> nn.Module:
    made: nn.Module = object.__new__(type(part))
    state: dict[str, Any] = vars(made)
    state |= vars(part)
    state |= {
        name: type(value)(active_hooks(value))
        for name, value in vars(part).items()
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, dict)
    }
    state["training"] = is_training
    return made


@cache
def _with_mixin(plain: type[nn.Module], mixin: type[nn.Module]) -> type[nn.Module]:
    return type(mixin.__name__ + plain.__name__, (mixin, plain), {"plain": getattr(plain, "plain", plain)})
