"""Decorator that registers the class of a custom module. Legend: B batch, T tokens, D width."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from clearhead.base.arguments import check_types
from clearhead.core.attention import Attention
from clearhead.core.extensions.cost import cache_numbers, flops
from clearhead.core.extensions.recomputing import RecomputedModule
from clearhead.core.model import Transformer
from clearhead.spec.describe import count_noun
from clearhead.spec.registry import PartSource, Role, add_kind, find_kind, own_parts

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@check_types
def register(described_by: type, role: Role = "function") -> Callable[[type[ModuleT]], type[ModuleT]]:
    """Return a decorator that registers the class of a custom module.

    The constructor takes a size and the dataclass. The size is the width, or for scores and weights the number of
    heads. `forward` takes x and a `core.context.Context`, and returns a tensor of the shape of x:

        function   x [batch, tokens, width], the width of the stack.
        norm       x [..., width]; the context is None.
        position   x [batch, tokens], positions; returns [batch, tokens, width]; the context is None.
        scores     x [batch, heads, queries, keys], before masking.
        weights    x [batch, heads, queries, keys], -inf where a mask hides; returns the attention weights.

    A function lists in `keeps` the names of the tensors that it stores in `context.cached_tensors(self)` between calls
    with a cache. It is then called with new tokens only. `keeps = ()` means that no token depends on others.
    Without `keeps`, each call gets all tokens again. Linear layers are initialized like those of the model; other
    weights keep the values that the constructor gave them.

    Args:
        described_by: spec of the module: a frozen dataclass of numbers, text, booleans and tuples. Its name in snake
            case is the kind. Optional methods: `flops(size)` per token, or per token and per pair of query and key;
            `cache_numbers(size)` per token.
        role: role of the module in the model, one of the five above.

    Raises:
        InputError: the dataclass is not frozen, cannot be written as JSON, or its name is already registered.
    """

    def add(module_type: type[ModuleT]) -> type[ModuleT]:
        built_type = _built_type(module_type, role)
        build = partial(_build, built_type)
        cost = partial(flops, build, role), partial(cache_numbers, build, role)
        add_kind(described_by, role, _origin(module_type), build, cost)
        return module_type

    return add


class WithoutContext(nn.Module):
    """Mixin for custom norms and position modules, which the model calls without a context."""

    def forward(self, x: Tensor, limit: int | None = None) -> Any:
        """Call the custom module with x and None as context."""
        return super().forward(x, None)


def keeps_nothing(module_type: type[nn.Module]) -> bool:
    """Return whether the class of a branch function has no `keeps` and is no `Attention`, so it caches nothing."""
    return not issubclass(module_type, Attention) and getattr(module_type, "keeps", None) is None


def recomputed_parts(module: nn.Module) -> list[str]:
    """Return a warning for each custom module class of a decoder that generation computes for all tokens again."""
    decoder = getattr(module, "decoder", None)
    names = (
        {type(inner).__name__ for inner in decoder.modules() if isinstance(inner, RecomputedModule)} if decoder else ()
    )
    return [
        f"{name} caches nothing, so each step of generation computes it for all tokens again" for name in sorted(names)
    ]


def part_lines(module: Transformer) -> list[str]:
    """Return a line for each kind of custom module in a model: its file, how often it occurs, what it caches."""
    modules: dict[str, list[nn.Module]] = {}
    for path, node in own_parts(module.spec):
        modules.setdefault(node.kind, []).append(module.get_submodule(path))
    lines = []
    for name, inner in modules.items():
        kind = find_kind(name)
        assert kind is not None, "every custom module of a model is registered"
        cache_text = f"; {_describe_cache(inner[0])}" if kind.role == "function" else ""
        lines.append(f"{name} of {kind.source}, {count_noun(len(inner), 'time')}{cache_text}")
    return lines


def _describe_cache(module: nn.Module) -> str:
    if isinstance(module, RecomputedModule):
        return "caches nothing while decoding, and is computed again for all tokens"
    keeps = getattr(module, "keeps", ("keys", "values"))
    return f"keeps {' and '.join(keeps)} while decoding" if keeps else "each token is computed by itself"


def _built_type(module_type: type[nn.Module], role: Role) -> type[nn.Module]:
    mixin: type[nn.Module] | None = WithoutContext if role in ("norm", "position") else None
    if role == "function" and keeps_nothing(module_type):
        mixin = RecomputedModule
    if mixin is None:
        return module_type
    return type(module_type.__name__, (mixin, module_type), {"__module__": module_type.__module__})


def _build(module_type: type[nn.Module], size: int, values: Any) -> nn.Module:
    """Build a custom module; on the meta device, buffers that no file saves are computed on the CPU."""
    extension = module_type(size, values)
    lost = [path for path, buffer in _unsaved_buffers(extension) if buffer.is_meta]
    if lost:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            computed = dict(_unsaved_buffers(module_type(size, values)))
        for path in lost:
            owner, _, name = path.rpartition(".")
            extension.get_submodule(owner)._buffers[name] = computed[path]
    for module in extension.modules():
        if not isinstance(module, nn.Linear) and not type(module).__module__.startswith("clearhead."):
            for parameter in module.parameters(recurse=False):
                vars(parameter)["is_made"] = True  # `initialize` leaves it
    vars(extension)["built_size"] = size
    return extension


def _unsaved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    saved = module.state_dict().keys()
    return ((path, buffer) for path, buffer in module.named_buffers() if path not in saved)


def _origin(module_type: type[nn.Module]) -> tuple[PartSource, str]:
    """Return the source file of a class and its path; in a notebook, an empty source and the name of the module."""
    try:
        path = Path(inspect.getfile(module_type)).resolve()
        content = path.read_bytes()
    except (OSError, TypeError):
        return PartSource("", ""), f"<{module_type.__module__}>"
    top = module_type.__module__.partition(".")[0]
    names = metadata.packages_distributions().get(top, [])
    package = f"{names[0]} {metadata.version(names[0])}" if names else ""
    return PartSource(path.name, hashlib.sha256(content).hexdigest(), package), str(path)
