"""Text descriptions of a spec: its stacks, its head, and its masks."""

from __future__ import annotations

from clearhead.spec.model import Model
from clearhead.spec.nodes import Attention, FeedForward, Head
from clearhead.spec.traversal import walk


def model_summary(model: Model) -> list[str]:
    """Return one line of text per stack, and one for the head."""
    lines = []
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if stack is None:
            continue
        nodes = [node for _, node in walk(stack)]
        heads = {str(node.num_heads) for node in nodes if isinstance(node, Attention)}
        sizes = {str(node.size) for node in nodes if isinstance(node, FeedForward)}
        layers, head = count_noun(len(stack.depths), "layer"), f"{_join_with_or(heads)} head{'s' * (heads != {'1'})}"
        numbers = f"{layers}, width {stack.width}, {head}"
        lines.append(f"  {name}: {numbers}, feed-forward {_join_with_or(sizes)}")
    return lines + ([] if model.head is None else [f"  head: {head_summary(model.head)}"])


def count_noun(count: int, noun: str) -> str:
    """Return a count with its noun in singular or plural, such as "1 layer" or "2 layers"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _join_with_or(numbers: set[str]) -> str:
    return " or ".join(sorted(numbers)) or "no"


def head_summary(head: Head) -> str:
    """Return the layers of a head in one line, such as "pool mean, linear 64, activation tanh, linear 2"."""
    return ", ".join(
        " ".join([layer.kind, *(str(getattr(layer, key)) for key in ("by", "size", "function") if hasattr(layer, key))])
        for layer in head.layers
    )


def decoder_masks(model: Model) -> list[str]:
    """Return the sorted kinds of mask in the self-attention of the decoder, such as ["causal"]."""
    nodes = [node for _, node in walk(model.decoder)] if model.decoder is not None else []
    return sorted({node.mask.kind for node in nodes if isinstance(node, Attention) and node.source == "self"})
