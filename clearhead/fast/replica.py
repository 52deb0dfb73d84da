"""Replicas: module trees over the same parameters, in which some modules have other classes.

The module tree of the user is never changed. Fast execution, and a call that needs evaluation mode or its own hooks,
use a replica. PyTorch replicates modules for several devices in the same way (`torch.nn.parallel.replicate`).
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
    """Return a second module tree with the same parameters and buffers; both trees share their dictionaries.

    A submodule that occurs several times does so in the replica too. The replica keeps the hooks that run in the
    calling context. Hooks registered or removed later concern one tree alone.

    Args:
        module: the module, which stays unchanged.
        is_training: True if the replica is in training mode, regardless of the module's mode.
    """
    twins = {original: _twin(original, is_training) for original in module.modules()}
    for original, twin in twins.items():
        state = vars(twin)
        state["_modules"] = {name: None if child is None else twins[child] for name, child in original._modules.items()}
        # A tuple can hold modules that belong to another module, such as the table that an output layer is tied to.
        for name, value in vars(original).items():
            if isinstance(value, Tied):
                state[name] = Tied(twins.get(value.module, value.module))
            elif isinstance(value, tuple) and any(isinstance(item, nn.Module) for item in value):
                state[name] = tuple(twins.get(item, item) for item in value)
    replica_of_module = twins[module]
    assert isinstance(replica_of_module, type(module))
    return replica_of_module


def override(module: nn.Module, mixin: type[MixinT]) -> MixinT:
    """Mix a class into one module of a replica: the mixin's methods come first, and `super()` calls the old class."""
    module.__class__ = cast("type[MixinT]", _with_mixin(type(module), mixin))  # type: ignore[arg-type]
    assert isinstance(module, mixin)
    return module


def plain_type(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module has in the plain tree."""
    plain: type[nn.Module] = getattr(type(module), "plain", type(module))
    return plain


def in_evaluation(module: ModuleT) -> ModuleT:
    """Return a tree in evaluation mode: the module itself, or a replica if a submodule is in training mode."""
    return replica(module) if any(submodule.training for submodule in module.modules()) else module


def use_eager(module: nn.Module, reason: str) -> None:
    """Make every attention of a module, and of its later replicas, use the eager kernel, and record the reason."""
    for attention in module.modules():
        if isinstance(attention, Attention):
            attention.eager_reason = reason


def refuse_to_run(module: nn.Module, reason: str) -> None:
    """Make calls of a module and of its submodules fail, after a replica has replaced it.

    Args:
        module: the module; from now on only its weights may be read.
        reason: end of the error message.
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
