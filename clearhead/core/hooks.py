"""Hook points: named places in a forward pass, beside the outputs of modules. `clearhead.maps` watches them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from clearhead.printing import PrintedModule

Watcher = Callable[[Tensor], Tensor]


class HookPoints(PrintedModule, nn.Module):
    """A module with hook points. While nothing watches them, a point costs one look at an attribute."""

    points: tuple[str, ...] = ()
    watchers: dict[str, list[Watcher]] | None = None

    def point(self, name: str, x: Tensor) -> Tensor:
        """Pass an activation through its point: each watcher returns it, or its replacement."""
        if self.watchers is not None:
            for watcher in self.watchers.get(name, ()):
                x = watcher(x)
        return x

    def is_watched(self, *names: str) -> bool:
        return self.watchers is not None and any(self.watchers.get(name) for name in names)

    def watch(self, name: str, watcher: Watcher) -> Callable[[], None]:
        """Let a function watch a point, until the function that this returns is called."""
        self.watchers = {} if self.watchers is None else self.watchers
        self.watchers.setdefault(name, []).append(watcher)
        return lambda: self._unwatch(name, watcher)

    def _unwatch(self, name: str, watcher: Watcher) -> None:
        assert self.watchers is not None
        self.watchers[name].remove(watcher)
        if not any(self.watchers.values()):
            del self.watchers  # compiled code asks whether the attribute is there
