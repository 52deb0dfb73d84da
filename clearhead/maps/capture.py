"""Observe and replace what the parts of a model compute, by module path, without touching the model.

A path is what `named_modules()` says, such as `decoder.layers.0.steps.1.branches.0.function.weights`; patterns are
those of `fnmatch`, where `*` also matches dots. Only modules that return one tensor can be observed or replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn

from clearhead.errors import InputError, nearest


def matching_paths(module: nn.Module, pattern: str) -> list[str]:
    """Return the paths of the submodules that a pattern names.

    Args:
        module: where to look; its own path is the empty string and no pattern names it.
        pattern: an `fnmatch` pattern.

    Raises:
        InputError: no path matches.
    """
    paths = [path for path, _ in module.named_modules() if path]
    matches = [path for path in paths if fnmatchcase(path, pattern)]
    if not matches:
        raise InputError(f"no part of the model is called '{pattern}'{nearest(pattern, paths)}")
    return matches


@contextmanager
def capture(module: nn.Module, patterns: str | Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Collect what the named submodules return while the context is open.

    Args:
        module: the model.
        patterns: one pattern or several.

    Returns:
        A dictionary that is filled as the model runs: path -> output, that of the latest call. The tensors are the
        model's own, still part of the graph where there is one.

    Raises:
        InputError: a pattern matches nothing, or a matching submodule returns something else than one tensor.
    """
    found: dict[str, Tensor] = {}

    def keep(path: str, output: Tensor) -> None:
        found[path] = output

    names = [patterns] if isinstance(patterns, str) else patterns
    with _hooks(module, {path: keep for pattern in names for path in matching_paths(module, pattern)}):
        yield found


@contextmanager
def replace(module: nn.Module, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Put something else in place of what the named submodules return, while the context is open.

    Args:
        module: the model.
        changes: pattern -> function from the output to what stands in its place, of the same shape. Where several
            patterns match one path, the functions are applied in the order given.

    Raises:
        InputError: a pattern matches nothing, a matching submodule returns something else than one tensor, or a
            function returns another shape.
    """
    with ExitStack() as stack:
        for pattern, change in changes.items():
            paths = matching_paths(module, pattern)
            stack.enter_context(_hooks(module, dict.fromkeys(paths, partial(_changed, change))))
        yield


def _changed(change: Callable[[Tensor], Tensor], path: str, output: Tensor) -> Tensor:
    instead = change(output)
    if instead.shape != output.shape:
        expected, given = list(output.shape), list(instead.shape)
        raise InputError(f"the replacement for '{path}' must have the shape {expected}, not {given}")
    return instead


@contextmanager
def _hooks(module: nn.Module, actions: Mapping[str, Callable[[str, Tensor], Tensor | None]]) -> Iterator[None]:
    handles = []

    def hook(path: str) -> Callable[[nn.Module, tuple[Any, ...], Any], Tensor | None]:
        def act(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Tensor | None:
            if not isinstance(output, Tensor):
                raise InputError(f"'{path}' returns {type(output).__name__}, not one tensor; name a part inside it")
            return actions[path](path, output)

        return act

    try:
        for path in actions:
            handles.append(module.get_submodule(path).register_forward_hook(hook(path)))
        yield
    finally:
        for handle in handles:
            handle.remove()
