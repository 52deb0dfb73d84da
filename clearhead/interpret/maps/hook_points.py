"""Capture and edit activations at their addresses while a model runs; the model itself does not change.

The address of a module (`decoder.layers.0.steps.1.branches.0.function`, `decoder.final_norm`, `head`) means its output.
All other addresses are hook points. A stack has `embedded`. Layers and steps have `before` and `after`, the residual
stream. An attention has `queries`, `keys`, `values`, `scores`, `weights` and `mixed`. The model has `hidden` and
`logits`. In a pattern, `*` matches within one component of an address, and `**` matches any number of components.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError, did_you_mean
from clearhead.base.hooks import Hook, HookPoints, Watcher, Watchers, texts_of_rows, watching
from clearhead.base.printing import Printed, block, short
from clearhead.core.context import Context
from clearhead.core.stack import Layer, Stack
from clearhead.spec.addresses import nearest_address, select_addresses


@dataclass(frozen=True)
class ActivationContext:
    """Address, depth, decoding step and token positions of an activation; second argument of an edit function.

    Args:
        address: address of the activation.
        depth: number of layers of its stack that ran before; 0 outside of the layers.
        step: number of earlier calls of its stack within the with block; during generation, the decoding step.
        positions: position of each token of this call, [texts, tokens], from 0 at the start of the text, so tokens in
            the KV cache count too. None means outside of the layers.
        texts: number of the text of each batch row, from 0, in the order of the texts. None means that the model was
            called with ids.
    """

    address: str
    depth: int
    step: int
    positions: Tensor | None = None
    texts: tuple[int, ...] | None = None


@dataclass(frozen=True, repr=False)
class Record(Printed):
    """Captured activation with its depth, step and texts; see `ActivationContext`.

    The tensor stays part of the autograd graph.
    """

    tensor: Tensor
    depth: int
    step: int
    texts: tuple[int, ...] | None = None


class Captured(dict[str, list[Record]]):
    """Dictionary from each address to its records, in the order of computation."""

    def __repr__(self) -> str:
        lines = [
            f"  {address}: {', '.join(short(record.tensor) for record in records)}" for address, records in self.items()
        ]
        return block([f"Captured activations at {len(self)} addresses", *lines], more="keys() has all addresses")

    def tensor(self, address: str) -> Tensor:
        """Return the activation of an address that has exactly one record.

        Raises:
            InputError: the address was not captured, or it has no record or several.
        """
        if address not in self:
            raise InputError(f"'{address}' was not captured{did_you_mean(address, self)}")
        records = self[address]
        if len(records) != 1:
            raise InputError(f"'{address}' has {len(records)} records, not one: choose one of captured['{address}']")
        return records[0].tensor


Action = Callable[[Tensor, ActivationContext], Tensor]
Edit = Action | Callable[[Tensor], Tensor]


def addresses(module: nn.Module) -> list[str]:
    """Return all addresses of a module's activations; modules come in the order of `named_modules()`.

    A module without a `forward` method, such as a list of layers, has no output and therefore no address.
    """
    names = []
    for path, child in module.named_modules():
        if path and type(child).forward is not nn.Module.forward:
            names.append(path)
        if isinstance(child, HookPoints):
            names += [f"{path}.{point}" if path else point for point in child.points]
    return names


def matching_addresses(module: nn.Module, patterns: str | Sequence[str]) -> list[str]:
    """Return the activation addresses of a module that match any of the patterns, each once.

    Raises:
        InputError: a pattern matches no address; the message names the nearest addresses.
    """
    known, selected = addresses(module), dict[str, None]()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = select_addresses(pattern, known)
        if not matches:
            hint = nearest_address(pattern, known)
            raise InputError(f"no activation of the model has the address '{pattern}'{hint}")
        selected |= dict.fromkeys(matches)
    return list(selected)


@check_types
@contextmanager
def capture(module: nn.Module, patterns: str | Sequence[str]) -> Iterator[Captured]:
    """Return a context manager that records activations while the model runs.

    Args:
        module: model, or any module of a model.
        patterns: addresses, or patterns of addresses, such as "decoder.**.weights".

    Returns:
        A dictionary that is filled while the model runs: one record each time an activation is computed.

    Raises:
        InputError: a pattern matches no address, or a module does not return exactly one tensor.
    """
    captured = Captured({address: [] for address in matching_addresses(module, patterns)})

    def keep(tensor: Tensor, at: ActivationContext) -> Tensor:
        captured[at.address].append(Record(tensor, at.depth, at.step, at.texts))
        return tensor

    with _watching(module, dict.fromkeys(captured, keep)):
        yield captured


@check_types
@contextmanager
def edit(module: nn.Module, edits: Mapping[str, Edit]) -> Iterator[None]:
    """Return a context manager in which functions replace activations; gradients flow through the replacements.

    Args:
        module: model, or any module of a model.
        edits: address or pattern -> function(tensor) or function(tensor, at) that returns a tensor of the same shape;
            `at` is an `ActivationContext`. The activation keeps its dtype and device. If several patterns match an
            address, their functions run in the order of `edits`.

    Raises:
        InputError: a pattern matches no address, or a module does not return exactly one tensor. A function has other
            parameters, or does not return a tensor of the same shape.
    """
    with ExitStack() as blocks:
        for pattern, change in edits.items():
            action = partial(_apply_edit, _accept_context(pattern, change))
            actions = dict.fromkeys(matching_addresses(module, pattern), action)
            blocks.enter_context(_watching(module, actions))
        yield


def _accept_context(pattern: str, change: Edit) -> Action:
    """Wrap an edit function so that it can be called with (tensor, at), even if it takes only a tensor."""
    function: Any = change
    try:
        parameters = inspect.signature(change.forward if isinstance(change, nn.Module) else change).parameters
    except ValueError:  # no signature: a function in C, such as torch.relu
        return lambda tensor, at: function(tensor)
    # A parameter with a default is a setting of the function, such as a value bound in a loop.
    numbered = enumerate(parameters.values())
    required = [
        parameter
        for index, parameter in numbered
        if parameter.default is parameter.empty or (index, parameter.name) == (1, "at")
    ]
    for count in (2, 1):
        with suppress(TypeError):
            inspect.Signature(required).bind(*range(count))
            return lambda tensor, at: function(*(tensor, at)[:count])
    taken = ", ".join(map(str, parameters.values()))
    raise InputError(f"the edit of '{pattern}' must be function(tensor) or function(tensor, at), got function({taken})")


def _apply_edit(change: Action, tensor: Tensor, at: ActivationContext) -> Tensor:
    edited: object = change(tensor, at)
    if not isinstance(edited, Tensor) or edited.shape != tensor.shape:
        result = f"the shape {list(edited.shape)}" if isinstance(edited, Tensor) else type(edited).__name__
        raise InputError(f"the edit of '{at.address}' must return a tensor of {list(tensor.shape)}, got {result}")
    return edited.to(tensor)


class _StackCounters:
    """Counts the calls of each stack, and keeps the depth and positions of the layer that runs now."""

    def __init__(self, module: nn.Module, watchers: Watchers, blocks: ExitStack) -> None:
        self.step: dict[str, int] = {}
        self.depth: dict[str, int] = {}
        self.positions: dict[str, Tensor] = {}
        self.stacks = [path for path, child in module.named_modules() if isinstance(child, Stack)] or [""]
        for path in self.stacks:
            stack = module.get_submodule(path)
            blocks.callback(stack.register_forward_pre_hook(Hook(watchers, self._begin(path))).remove)
            layers = (
                [child for child in stack.modules() if isinstance(child, Layer)] if isinstance(stack, Stack) else []
            )
            for layer in layers:
                blocks.callback(layer.register_forward_pre_hook(Hook(watchers, self._enter(path))).remove)

    def _begin(self, path: str) -> Callable[..., None]:
        def begin(*call: object) -> None:
            self.step[path] = self.step.get(path, -1) + 1

        return begin

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(_layer: nn.Module, inputs: tuple[Tensor, Context]) -> None:
            self.depth[path], self.positions[path] = inputs[1].depth, inputs[1].query_position

        return enter

    def current_context(self, address: str) -> ActivationContext:
        """Return the context of the current activation; outside of all stacks, it has the step of the last stack."""
        enclosing = [path for path in self.stacks if address.startswith(f"{path}.") or not path]
        stack = enclosing[-1] if enclosing else self.stacks[-1]
        inner = address.removeprefix(f"{stack}.")
        step = self.step.get(stack, 0)
        if not inner.startswith("layers."):
            return ActivationContext(address, 0, step, None, texts_of_rows())
        return ActivationContext(address, self.depth.get(stack, 0), step, self.positions.get(stack), texts_of_rows())


@contextmanager
def _watching(module: nn.Module, actions: Mapping[str, Action]) -> Iterator[None]:
    parts, watchers = dict(module.named_modules()), dict[tuple[object, str], list[Watcher]]()
    with ExitStack() as blocks:
        clock = _StackCounters(module, watchers, blocks)
        for address, action in actions.items():
            if address in parts:
                hook = Hook(watchers, partial(_act, address, action, clock))
                blocks.callback(parts[address].register_forward_hook(hook).remove)
            else:
                path, _, point = address.rpartition(".")
                owner = parts[path]
                assert isinstance(owner, HookPoints)
                watchers[owner.identity, point] = [_watcher(address, action, clock)]
        if _has_compiled():
            warnings.warn("torch.compile is off while activations are captured or edited", stacklevel=4)
            blocks.enter_context(_eager_stance())
        blocks.enter_context(watching(watchers))
        yield


class _EagerStance:
    """Context manager that turns torch.compile off in this process; nested and concurrent uses are counted."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0
        self._stance: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._stance is not None:
                self._stance.__exit__(None, None, None)


@cache
def _eager_stance() -> _EagerStance:
    return _EagerStance()


def _has_compiled() -> bool:
    """Return whether this process compiled a graph, without importing the compiler, which takes seconds."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["stats"].get("unique_graphs", 0) > 0


def _watcher(address: str, action: Action, clock: _StackCounters) -> Callable[[Tensor], Tensor]:
    return lambda tensor: action(tensor, clock.current_context(address))


def _act(
    address: str, action: Action, clock: _StackCounters, _module: nn.Module, _inputs: tuple[Any, ...], output: Any
) -> Tensor:
    if not isinstance(output, Tensor):
        raise InputError(f"'{address}' must return one tensor, got {type(output).__name__}: name a module inside it")
    return action(output, clock.current_context(address))
