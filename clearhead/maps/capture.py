"""Capture and edit the outputs of submodules while a model runs.

A path is that of `named_modules()`, such as `decoder.layers.0.steps.1.branches.0.function.weights`; a pattern is one
of `fnmatch`, where `*` also matches dots. The output of a submodule must be one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn

from clearhead.errors import InputError, nearest

Action = Callable[[str, Tensor], Tensor | None]


def matching_paths(module: nn.Module, pattern: str) -> list[str]:
    """Return the paths of the submodules that match a pattern.

    Args:
        module: the model; its own path is the empty string, which no pattern matches.
        pattern: an `fnmatch` pattern.

    Raises:
        InputError: no path matches.
    """
    paths = [path for path, _ in module.named_modules() if path]
    matches = [path for path in paths if fnmatchcase(path, pattern)]
    if not matches:
        raise InputError(f"no submodule matches '{pattern}'{nearest(pattern, paths)}")
    return matches


@contextmanager
def capture(module: nn.Module, patterns: str | Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Collect the outputs of submodules while the context is open.

    Args:
        module: the model.
        patterns: one pattern or several.

    Returns:
        A dictionary that is filled as the model runs: path -> output of the latest call. The tensors are those of the
        model, still part of the graph where there is one.

    Raises:
        InputError: a pattern matches nothing, or the output of a matching submodule is not one tensor.
    """
    found: dict[str, Tensor] = {}
    names = [patterns] if isinstance(patterns, str) else patterns
    paths = [path for pattern in names for path in matching_paths(module, pattern)]
    with _hooks(module, dict.fromkeys(paths, found.__setitem__)):
        yield found


@contextmanager
def edit(module: nn.Module, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Replace the outputs of submodules while the context is open.

    Args:
        module: the model.
        changes: pattern -> function from the output to its replacement, of the same shape. Where several patterns match
            one path, the functions are applied in the order given.

    Raises:
        InputError: a pattern matches nothing, the output of a matching submodule is not one tensor, or a function
            returns another shape.
    """
    with ExitStack() as stack:
        for pattern, change in changes.items():
            paths = matching_paths(module, pattern)
            stack.enter_context(_hooks(module, dict.fromkeys(paths, partial(_edited, change))))
        yield


def _edited(change: Callable[[Tensor], Tensor], path: str, output: Tensor) -> Tensor:
    replacement = change(output)
    if replacement.shape != output.shape:
        expected, given = list(output.shape), list(replacement.shape)
        raise InputError(f"the replacement for '{path}' must have the shape {expected}, not {given}")
    return replacement


@contextmanager
def _hooks(module: nn.Module, actions: Mapping[str, Action]) -> Iterator[None]:
    with ExitStack() as stack:
        for path, action in actions.items():
            handle = module.get_submodule(path).register_forward_hook(partial(_run, path, action))
            stack.enter_context(handle)
        yield


def _run(path: str, action: Action, _module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Tensor | None:
    if not isinstance(output, Tensor):
        raise InputError(f"'{path}' returns {type(output).__name__}, not one tensor; name a submodule inside it")
    return action(path, output)
