"""A spec as text: its tree, its head, and its masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clearhead.spec.base import Node
from clearhead.spec.model import Model
from clearhead.spec.nodes import Attention, Head
from clearhead.spec.traversal import walk


def head_summary(head: Head) -> str:
    """Return the layers of a head in one line: pool mean, linear 64, activation tanh, linear 2."""
    return ", ".join(
        " ".join([layer.kind, *(str(getattr(layer, key)) for key in ("by", "size", "function") if hasattr(layer, key))])
        for layer in head.layers
    )


def decoder_masks(model: Model) -> list[str]:
    """Return the kinds of mask in the self-attention of the decoder."""
    nodes = [node for _, node in walk(model.decoder)] if model.decoder is not None else []
    return sorted({node.mask.kind for node in nodes if isinstance(node, Attention) and node.source == "self"})


def tree_lines(node: Node, name: str = "model", depth: int = 0) -> Iterator[str]:
    """Yield the tree as indented lines, one for each node; equal neighbours share their lines."""
    values = {key: getattr(node, key) for key in type(node).model_fields if key != "kind"}
    plain = [f"{key}={value}" for key, value in values.items() if not isinstance(value, Node | tuple | None)]
    yield f"{'  ' * depth}{name}: {type(node).__name__}{'(' + ', '.join(plain) + ')' if plain else ''}"
    for key, value in values.items():
        if isinstance(value, Node):
            yield from tree_lines(value, key, depth + 1)
        elif isinstance(value, tuple):
            for label, child in _folded(value):
                yield from tree_lines(child, f"{key}.{label}", depth + 1)


def _folded(children: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Yield runs of equal neighbours once, labelled with their first and last index."""
    start = 0
    for end in range(1, len(children) + 1):
        if end == len(children) or children[end] != children[start]:
            yield (str(start) if end == start + 1 else f"{start}-{end - 1}"), children[start]
            start = end
