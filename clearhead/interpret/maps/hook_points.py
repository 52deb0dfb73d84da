"""Capture and edit activations at their addresses while a model runs, without touching the model.

An address that names a module (`decoder.layers.0.steps.1.branches.0.function`, `decoder.final_norm`, `head`) means its
output. Beside these are hook points: `embedded` of a stack; `before` and `after` of a layer and of a step, the residual
stream; `queries`, `keys`, `values`, `scores`, `weights` and `mixed` of an attention; `hidden` and `logits`. In a
pattern, `*` stands for anything within one part of an address and `**` for any parts.
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
    """Where and when an activation is: what an edit is told beside the tensor.

    Args:
        address: of the activation.
        depth: how many layers of its stack ran before; 0 outside of the layers.
        step: how many calls of its stack came before in this block: the decoding step, where tokens are generated.
        positions: of the tokens of this call, [texts, tokens], from 0: the real tokens before each, cached ones
            included; None outside of the layers.
        texts: for each row of the batch the number of its text, from 0, in the order in which the texts were given;
            None where the model was called with ids.
    """

    address: str
    depth: int
    step: int
    positions: Tensor | None = None
    texts: tuple[int, ...] | None = None


@dataclass(frozen=True, repr=False)
class Record(Printed):
    """An activation as the model computed it, still part of the graph where there is one; see `Place`."""

    tensor: Tensor
    depth: int
    step: int
    texts: tuple[int, ...] | None = None


class Captured(dict[str, list[Record]]):
    """The records of each address, in the order in which they were computed."""

    def __repr__(self) -> str:
        lines = [
            f"  {address}: {', '.join(short(record.tensor) for record in records)}" for address, records in self.items()
        ]
        return block([f"Captured activations at {len(self)} addresses", *lines], more="keys() has all addresses")

    def tensor(self, address: str) -> Tensor:
        """Return the only activation of an address.

        Raises:
            InputError: the address was not captured, or it has no record or several.
        """
        if address not in self:
            raise InputError(f"'{address}' was not captured{did_you_mean(address, self)}")
        records = self[address]
        if len(records) != 1:
            raise InputError(f"'{address}' has {len(records)} records, not one: choose among captured['{address}']")
        return records[0].tensor


Action = Callable[[Tensor, ActivationContext], Tensor]
Edit = Action | Callable[[Tensor], Tensor]


def addresses(module: nn.Module) -> list[str]:
    """Return every address of a module's activations, those of modules in the order of `named_modules()`.

    A module that computes nothing itself, such as a list of layers, has no output and so no address.
    """
    names = []
    for path, child in module.named_modules():
        if path and type(child).forward is not nn.Module.forward:
            names.append(path)
        if isinstance(child, HookPoints):
            names += [f"{path}.{point}" if path else point for point in child.points]
    return names


def matching_addresses(module: nn.Module, patterns: str | Sequence[str]) -> list[str]:
    """Return the addresses that patterns match, each once.

    Raises:
        InputError: a pattern matches none; the nearest addresses are named.
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
    """Collect activations while the block is open.

    Args:
        module: a model, or any part of one.
        patterns: addresses, or patterns of them.

    Returns:
        a dictionary that fills as the model runs: one record for each time that an activation is computed.

    Raises:
        InputError: a pattern matches nothing, or a module returns something else than one tensor.
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
    """Put something else in the place of activations while the block is open; gradients flow through it.

    Args:
        module: a model, or any part of one.
        edits: address or pattern -> function(tensor) or function(tensor, at) that returns a tensor of the same shape;
            `at` is a `Place`. The activation keeps its dtype and device. Where several patterns match one address,
            their functions are applied in the order given.

    Raises:
        InputError: a pattern matches nothing, a module returns something else than one tensor, or a function takes
            other arguments, or returns something else than a tensor of the same shape.
    """
    with ExitStack() as blocks:
        for pattern, change in edits.items():
            action = partial(_apply_edit, _accept_context(pattern, change))
            actions = dict.fromkeys(matching_addresses(module, pattern), action)
            blocks.enter_context(_watching(module, actions))
        yield


def _accept_context(pattern: str, change: Edit) -> Action:
    """Return an edit that is told the place; one that asks for a tensor alone gets no more."""
    function: Any = change
    try:
        parameters = inspect.signature(change.forward if isinstance(change, nn.Module) else change).parameters
    except ValueError:  # a function in C, such as torch.relu
        return lambda tensor, at: function(tensor)
    # What has a default is a setting of the function's own, such as a value that a loop binds.
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
    raise InputError(f"the edit of '{pattern}' must be function(tensor) or function(tensor, at), not function({taken})")


def _apply_edit(change: Action, tensor: Tensor, at: ActivationContext) -> Tensor:
    edited: object = change(tensor, at)
    if not isinstance(edited, Tensor) or edited.shape != tensor.shape:
        result = f"the shape {list(edited.shape)}" if isinstance(edited, Tensor) else type(edited).__name__
        raise InputError(f"the edit of '{at.address}' must return a tensor of {list(tensor.shape)}, not {result}")
    return edited.to(tensor)


class _StackCounters:
    """Counts, while a block is open, the calls of each stack and keeps depth and positions of the layer that runs."""

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
        """Return where and when an activation is that is computed now; what is in no stack is after the last one."""
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
            warnings.warn("compiled steps run uncompiled while activations are watched", stacklevel=4)
            blocks.enter_context(_eager_stance())
        blocks.enter_context(watching(watchers))
        yield


class _EagerStance:
    """How many blocks of this process are open in which compiled steps run uncompiled: PyTorch has one stance."""

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
    """Say whether this process compiled anything; asking the compiler itself would import it, which takes seconds."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and utils.counters["stats"].get("unique_graphs", 0) > 0


def _watcher(address: str, action: Action, clock: _StackCounters) -> Callable[[Tensor], Tensor]:
    return lambda tensor: action(tensor, clock.current_context(address))


def _act(
    address: str, action: Action, clock: _StackCounters, _module: nn.Module, _inputs: tuple[Any, ...], output: Any
) -> Tensor:
    if not isinstance(output, Tensor):
        raise InputError(f"'{address}' returns {type(output).__name__}, not one tensor; name a part inside it")
    return action(output, clock.current_context(address))
