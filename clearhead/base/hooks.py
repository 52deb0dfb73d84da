"""Hook points inside modules, and forward hooks, that are active in one context (a thread or a task).

A context sees and changes activations in its own calls only, even if other contexts use the same module. Hook points
change no module. The forward hooks on outputs are registered on modules, and do nothing in other contexts.
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
"""Functions by the identity of a module and the name of a hook point, called in order."""
_WATCHING: Final[ContextVar[tuple[Watchers, ...]]] = ContextVar("_WATCHING", default=())
_ROWS: Final[ContextVar[tuple[int, ...] | None]] = ContextVar("_ROWS", default=None)
_NUMBERS: Final[ContextVar[tuple[int, ...] | None]] = ContextVar("_NUMBERS", default=None)


class HookPoints(PrintedModule, nn.Module):
    """Module with hook points: named activations inside its forward pass, besides its output.

    A hook point that nothing watches costs one read of a context variable.
    """

    points: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.identity: object = object()  # replicas of a module share it, copies have their own

    def point(self, name: str, x: Tensor) -> Tensor:
        """Pass an activation through the functions that watch a hook point; each returns it or a replacement."""
        for watcher in self._watchers(name):
            x = watcher(x)
        return x

    def is_watched(self, *names: str) -> bool:
        """Return whether the calling thread or task watches one of the named hook points of this module."""
        return any(map(self._watchers, names))

    def _watchers(self, name: str) -> list[Watcher]:
        # Compiled steps run uncompiled while anything is watched.
        active = () if torch.compiler.is_compiling() else _WATCHING.get()
        return [watcher for watchers in active for watcher in watchers.get((self.identity, name), ())]


class Hook:
    """Forward hook of a module that runs only in the context that entered `watching`.

    Args:
        watchers: the watchers that were passed to `watching`.
        run: the hook function.
    """

    def __init__(self, watchers: Watchers, run: Callable[..., Any]) -> None:
        self._watchers, self._run = watchers, run

    @property
    def is_active(self) -> bool:
        """True if the calling thread or task is inside a `watching` block with these watchers."""
        return any(watchers is self._watchers for watchers in _WATCHING.get())

    def __call__(self, *call: object) -> Any:
        """Call the hook function and return its result if the hook is active; otherwise return None."""
        return self._run(*call) if self.is_active else None


@contextmanager
def watching(watchers: Watchers) -> Iterator[None]:
    """Call functions at their hook points within the with block, in the thread or task that entered it."""
    _WATCHING.set((*_WATCHING.get(), watchers))
    try:
        yield
    finally:
        _WATCHING.set(tuple(entry for entry in _WATCHING.get() if entry is not watchers))


def is_watching() -> bool:
    """Return whether the calling thread or task watches any module."""
    return bool(_WATCHING.get())


def texts_of_rows() -> tuple[int, ...] | None:
    """Return the number of each batch row's text; None outside of a `naming_texts` block."""
    return _ROWS.get()


@contextmanager
def naming_texts(numbers: Iterable[int], *, are_rows: bool = True) -> Iterator[None]:
    """Record which text each row of a batch belongs to, while a model runs in the with block.

    Args:
        numbers: the number of each row's text, from 0; inside another such block, an index into its texts.
        are_rows: True if the numbers belong to the rows of a batch. False if they belong to a group of texts, which
            inner blocks number from 0 again.
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
    """Return the hooks from a module's dictionary that run in the calling thread or task."""
    return {number: hook for number, hook in list(hooks.items()) if getattr(hook, "is_active", True)}


def is_seen(module: nn.Module) -> bool:
    """Return whether the calling thread or task watches or changes a module; submodules do not count."""
    if any(active_hooks(hooks) for hooks in (module._forward_hooks, module._forward_pre_hooks) if hooks):
        return True
    return isinstance(module, HookPoints) and module.is_watched(*module.points)


def are_seen(modules: Iterable[nn.Module]) -> bool:
    """Return whether the calling thread or task watches or changes one of these modules."""
    if _WATCHING.get():
        return any(map(is_seen, modules))
    return any(is_seen(module) for module in modules if module._forward_hooks or module._forward_pre_hooks)
