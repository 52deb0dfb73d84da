"""Functions that walk through a spec, and that replace some of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from clearhead.base.arguments import check_types, explain_types
from clearhead.spec.base import Node

Tree = TypeVar("Tree", bound=Node)


@check_types
def walk(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield every node of a spec with its path, such as "encoder.layers.0", parents before their children."""
    waiting = [(path, node)]
    while waiting:
        current_path, current = waiting.pop()
        yield current_path, current
        below: list[tuple[str, Node]] = []
        for name in type(current).model_fields:
            value = getattr(current, name)
            if isinstance(value, Node):
                below.append((f"{current_path}.{name}" if current_path else name, value))
            elif isinstance(value, tuple):
                inside = f"{current_path}.{name}" if current_path else name
                below += [(f"{inside}.{index}", child) for index, child in enumerate(value) if isinstance(child, Node)]
        waiting.extend(reversed(below))


@explain_types
def map_nodes(node: Tree, change: Callable[[str, Node], Node], path: str = "") -> Tree:
    """Return a copy of a spec in which `change` replaces nodes below the root, children before their parents.

    Args:
        node: the root of the tree; it is not replaced itself.
        change: function that takes the path of a node and the node, and returns the node or a replacement.
        path: the path of the root.
    """
    updates: dict[str, object] = {}
    for name in type(node).model_fields:
        value = getattr(node, name)
        child_path = f"{path}.{name}" if path else name
        if isinstance(value, Node):
            updates[name] = _map_node(value, change, child_path)
        elif isinstance(value, tuple) and any(isinstance(child, Node) for child in value):
            updates[name] = tuple(
                _map_node(child, change, f"{child_path}.{index}") for index, child in enumerate(value)
            )
    return node.model_copy(update=updates)


def _map_node(node: Node, change: Callable[[str, Node], Node], path: str) -> Node:
    return change(path, map_nodes(node, change, path))
