"""Traversal of a spec tree: every node with its path, and the tree with some nodes replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from clearhead.base.arguments import checked, explained
from clearhead.spec.base import Node

Tree = TypeVar("Tree", bound=Node)


@checked
def walk(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield every node with its path, parents first; an index is a part of a path, as in module names."""
    waiting = [(path, node)]
    while waiting:
        place, current = waiting.pop()
        yield place, current
        below: list[tuple[str, Node]] = []
        for name in type(current).model_fields:
            value = getattr(current, name)
            if isinstance(value, Node):
                below.append((f"{place}.{name}" if place else name, value))
            elif isinstance(value, tuple):
                inside = f"{place}.{name}" if place else name
                below += [(f"{inside}.{index}", part) for index, part in enumerate(value) if isinstance(part, Node)]
        waiting.extend(reversed(below))


@explained
def map_nodes(node: Tree, change: Callable[[str, Node], Node], path: str = "") -> Tree:
    """Return a tree in which `change` has replaced every node below the root, children before their parents.

    Args:
        node: the root; its type does not change.
        change: takes the path of a node and the node; returns it or a replacement.
        path: of the root.
    """
    updates: dict[str, object] = {}
    for name in type(node).model_fields:
        value = getattr(node, name)
        place = f"{path}.{name}" if path else name
        if isinstance(value, Node):
            updates[name] = _changed(value, change, place)
        elif isinstance(value, tuple) and any(isinstance(part, Node) for part in value):
            updates[name] = tuple(_changed(part, change, f"{place}.{index}") for index, part in enumerate(value))
    return node.model_copy(update=updates)


def _changed(node: Node, change: Callable[[str, Node], Node], path: str) -> Node:
    return change(path, map_nodes(node, change, path))
