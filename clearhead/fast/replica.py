"""Replicas: other trees of modules over the same parameters, some of whose parts have classes of their own.

The tree that a user holds is never touched: what computes faster, or what a call wants for itself (evaluation mode,
hooks), is a replica. PyTorch replicates modules for several devices in the same way (`torch.nn.parallel.replicate`).
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, cast

from torch import nn

from clearhead.base.errors import RunFailure
from clearhead.base.hooks import active_hooks
from clearhead.base.tied import Tied
from clearhead.core.attention import Attention

ModuleT = TypeVar("ModuleT", bound=nn.Module)
MixinT = TypeVar("MixinT", bound=nn.Module)


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


def override(module: nn.Module, mixin: type[MixinT]) -> MixinT:
    """Put a class before that of a part of a replica: its methods override those of the part, which `super()` has."""
    module.__class__ = cast("type[MixinT]", _with_mixin(type(module), mixin))  # type: ignore[arg-type]
    assert isinstance(module, mixin)
    return module


def plain_type(module: nn.Module) -> type[nn.Module]:
    """Return the class that a part has in the plain tree."""
    plain: type[nn.Module] = getattr(type(module), "plain", type(module))
    return plain


def in_evaluation(module: ModuleT) -> ModuleT:
    """Return a tree in evaluation mode: the module itself, or a replica where some of its parts are in training."""
    return replica(module) if any(submodule.training for submodule in module.modules()) else module


def use_eager(module: nn.Module, reason: str) -> None:
    """Let every attention of a module, and of its later replicas, use the eager kernel for a reason."""
    for attention in module.modules():
        if isinstance(attention, Attention):
            attention.eager_reason = reason


def refuse_to_run(module: nn.Module, reason: str) -> None:
    """Refuse calls of a module, and of each of its parts, whose replica has taken its place.

    Args:
        module: of which only the weights are read from now on.
        why: ends the message.
    """

    def refuse(*_: object) -> None:
        raise RunFailure(f"this module cannot run: {reason}")

    for submodule in module.modules():
        submodule.register_forward_pre_hook(refuse)


def _twin(module: nn.Module, is_training: bool) -> nn.Module:
    twin: nn.Module = object.__new__(type(module))
    state: dict[str, Any] = vars(twin)
    state |= vars(module)
    state |= {
        name: type(value)(active_hooks(value))
        for name, value in vars(module).items()
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, dict)
    }
    state["training"] = is_training
    return twin


@cache
def _with_mixin(plain: type[nn.Module], mixin: type[nn.Module]) -> type[nn.Module]:
    return type(mixin.__name__ + plain.__name__, (mixin, plain), {"plain": getattr(plain, "plain", plain)})
