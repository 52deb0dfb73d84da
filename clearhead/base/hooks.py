"""Who watches a model run: hook points inside modules, and forward hooks, that belong to a context.

A context is a thread or a task. What it watches is seen and changed in its own calls alone, however many others use the
same module meanwhile, and no module is written to for it but the forward hooks of the outputs of modules, which are
silent in other contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor, nn

from clearhead.base.printing import PrintedModule

Watcher = Callable[[Tensor], Tensor]
Watchers = Mapping[tuple[object, str], list[Watcher]]
"""By the identity of a module and the name of a point; the functions are called in order."""
_WATCHING: Final[ContextVar[tuple[Watchers, ...]]] = ContextVar("_WATCHING", default=())
_ROWS: Final[ContextVar[tuple[int, ...] | None]] = ContextVar("_ROWS", default=None)
_NUMBERS: Final[ContextVar[tuple[int, ...] | None]] = ContextVar("_NUMBERS", default=None)


class HookPoints(PrintedModule, nn.Module):
    """A module with hook points: named places in its forward pass, beside its output.

    While nothing watches them, a point costs one look at a context variable.
    """

    points: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.identity: object = object()  # replicas of a module share it, copies have their own

    def point(self, name: str, x: Tensor) -> Tensor:
        """Pass an activation through its point: each watcher returns it, or its replacement."""
        for watcher in self._watchers(name):
            x = watcher(x)
        return x

    def is_watched(self, *names: str) -> bool:
        """Return whether the calling context watches one of these points."""
        return any(map(self._watchers, names))

    def _watchers(self, name: str) -> list[Watcher]:
        # Compiled steps run uncompiled while anything is watched.
        active = () if torch.compiler.is_compiling() else _WATCHING.get()
        return [watcher for watchers in active for watcher in watchers.get((self.identity, name), ())]


class Hook:
    """A forward hook of a module that runs in the context of its block alone.

    Args:
        watchers: the block, as `watching` got it.
        run: the hook.
    """

    def __init__(self, watchers: Watchers, run: Callable[..., Any]) -> None:
        self._watchers, self._run = watchers, run

    @property
    def is_active(self) -> bool:
        """Whether the block is open in the calling context."""
        return any(watchers is self._watchers for watchers in _WATCHING.get())

    def __call__(self, *call: object) -> Any:
        """Run the hook, or do nothing where its block is not open."""
        return self._run(*call) if self.is_active else None


@contextmanager
def watching(watchers: Watchers) -> Iterator[None]:
    """Let functions watch points in the calling context while the block is open."""
    _WATCHING.set((*_WATCHING.get(), watchers))
    try:
        yield
    finally:
        _WATCHING.set(tuple(entry for entry in _WATCHING.get() if entry is not watchers))


def is_watching() -> bool:
    """Return whether the calling context watches any module."""
    return bool(_WATCHING.get())


def texts_of_rows() -> tuple[int, ...] | None:
    """Return the number of the text of each row of the running batch; None: the caller runs the model itself."""
    return _ROWS.get()


@contextmanager
def naming_texts(numbers: Iterable[int], *, are_rows: bool = True) -> Iterator[None]:
    """Name the texts of a batch while a model runs in the block.

    Args:
        numbers: for each row the number of its text, among the texts of the enclosing block.
        are_rows: False: these are not the rows of a batch yet, but the texts that inner blocks number anew from 0.
    """
    outer, named = _NUMBERS.get(), None
    if is_watching():
        named = tuple(numbers) if outer is None else tuple(outer[number] for number in numbers)
    variable = _ROWS if are_rows else _NUMBERS
    token = variable.set(named)
    try:
        yield
    finally:
        variable.reset(token)


def active_hooks(hooks: Mapping[int, Any]) -> dict[int, Any]:
    """Return those hooks of a module that run in the calling context: all but the silent ones of other contexts."""
    return {number: hook for number, hook in list(hooks.items()) if getattr(hook, "is_active", True)}


def is_seen(module: nn.Module) -> bool:
    """Return whether the calling context sees or changes what passes through a module; its parts are not looked at."""
    if any(active_hooks(hooks) for hooks in (module._forward_hooks, module._forward_pre_hooks) if hooks):
        return True
    return isinstance(module, HookPoints) and module.is_watched(*module.points)


def are_seen(modules: Iterable[nn.Module]) -> bool:
    """Return whether the calling context sees or changes what passes through one of these modules."""
    if _WATCHING.get():
        return any(map(is_seen, modules))
    return any(is_seen(module) for module in modules if module._forward_hooks or module._forward_pre_hooks)
