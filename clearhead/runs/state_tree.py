"""Nested state, such as an optimizer's, as JSON for its shape and a flat dict for its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def flatten(tree: object) -> tuple[Any, dict[str, Tensor]]:
    """Take the tensors out of a nested state.

    Args:
        tree: any nesting of dicts, lists, tuples, tensors, strings, numbers, booleans and None.

    Returns:
        The structure as JSON values, and the tensors by the name that stands for them in it.

    Raises:
        TypeError: something in the tree is none of these.
    """
    tensors: dict[str, Tensor] = {}
    return _flatten(tree, "", tensors), tensors


def unflatten(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put the tensors back: the inverse of `flatten`, also for the types of keys and the kinds of sequences."""
    if isinstance(structure, list):
        return [unflatten(item, tensors) for item in structure]
    if not isinstance(structure, dict):
        return structure
    ((kind, content),) = structure.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "tuple":
            return tuple(unflatten(item, tensors) for item in content)
        case "dict":
            return {unflatten(key, tensors): unflatten(value, tensors) for key, value in content}
        case "float":
            return float(content)
    raise TypeError(f"unknown kind {kind!r} in a stored state")


def _flatten(tree: object, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        name = path or "tensor"
        # A dict may hold both 1 and "1": the two paths read alike
        while name in tensors:
            name += "'"
        tensors[name] = tree
        return {"tensor": name}
    if tree is None or isinstance(tree, bool | int | str):
        return tree
    if isinstance(tree, float):
        # JSON has no infinity and no NaN
        return tree if math.isfinite(tree) else {"float": repr(tree)}
    if isinstance(tree, Mapping):
        pairs = tree.items()
        return {
            "dict": [[_flatten(key, path, tensors), _flatten(value, _join(path, key), tensors)] for key, value in pairs]
        }
    if isinstance(tree, list | tuple):
        items = [_flatten(item, _join(path, index), tensors) for index, item in enumerate(tree)]
        return items if isinstance(tree, list) else {"tuple": items}
    raise TypeError(f"a state can hold tensors and plain values, not {type(tree).__name__} (at {path or 'its top'})")


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
