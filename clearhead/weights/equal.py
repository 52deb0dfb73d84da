"""Other specs that compute the same: what a family cannot say of a model, it may say of the model's equal.

The stream of a Transformer has no order of its own: where all that writes it and all that reads it is permuted alike,
nothing changes but the order of sums. So sines and cosines that take turns can stand in halves. A bias that is absent
is a bias of zeros. Legend: D width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from clearhead import spec
from clearhead.core import Transformer
from clearhead.weights.fill import built


def equal_forms(module: Transformer) -> Iterator[Transformer]:
    """Yield a module, and then modules with other specs and tensors that compute the same, up to the order of sums."""
    yield module
    halves = in_halves(module)
    for form in (module, halves) if halves is not None else (module,):
        biased = with_bias(form)
        yield from (one for one in (form if form is not module else None, biased) if one is not None)


def with_bias(module: Transformer) -> Transformer | None:
    """Return the module with a bias of zeros in the map that ends its head; None: there is no such map without one."""
    head = module.spec.head
    last = head.layers[-1] if head is not None else None
    if head is None or not isinstance(last, spec.Linear) or last.bias:
        return None
    layers = (*head.layers[:-1], last.model_copy(update={"bias": True}))
    model = module.spec.model_copy(update={"head": head.model_copy(update={"layers": layers})})
    like = next(module.parameters())
    zeros = {f"head.layers.{len(layers) - 1}.bias": torch.zeros(last.size, dtype=like.dtype, device=like.device)}
    return built(model, dict(module.state_dict()) | zeros, training=module.training)


def in_halves(module: Transformer) -> Transformer | None:
    """Return the module with all sines of a position before all cosines.

    Returns:
        The module; None: positions are no sines that take turns with cosines in every stack, or something in it reads
        the stream in an order of its own.
    """
    stacks = {name: stack for name in ("encoder", "decoder") if (stack := getattr(module.spec, name)) is not None}
    if not all(_is_plain(stack) for stack in stacks.values()) or len({one.width for one in stacks.values()}) > 1:
        return None
    width = next(iter(stacks.values())).width
    order_D = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    update = {}
    for name, stack in stacks.items():
        position = stack.embedding.position.model_copy(update={"layout": "halves"})
        update[name] = stack.model_copy(update={"embedding": stack.embedding.model_copy(update={"position": position})})
    axes = _stream_axes(module)
    tensors = dict(module.state_dict())
    for name, tensor in tensors.items():
        for axis in axes.get(name, ()):
            tensor = tensor.index_select(axis, order_D.to(tensor.device))
        tensors[name] = tensor
    return built(module.spec.model_copy(update=update), tensors, training=module.training)


def _is_plain(stack: spec.Stack) -> bool:
    """Whether the stream of a stack is that of its table and nothing in it has an order of its own."""
    position = stack.embedding.position
    functions = [branch.function for layer in stack.layers for step in layer.steps for branch in step.branches]
    return (
        isinstance(position, spec.Sinusoidal)
        and position.layout == "interleaved"
        and stack.embedding.width is None
        and stack.projection_out is None
        and all(
            isinstance(one, spec.FeedForward)
            or (isinstance(one, spec.Attention) and not isinstance(one.score_bias, spec.Disentangled))
            for one in functions
        )
    )


def _stream_axes(module: Transformer) -> dict[str, tuple[int, ...]]:
    """Return, for each tensor that reads or writes the stream, the axes along which it does."""
    axes = _head_axes(module.spec)
    for name in module.state_dict():
        *place, leaf = name.split(".")
        if place[0] == "head" or place[-1] in ("query_norm", "key_norm", "score_table", "score_bias") or leaf == "sink":
            continue
        if place[-1] in ("table", "segments", "query", "key", "value", "up", "gate"):
            axes |= {name: (1,)} if leaf == "weight" else {}
        else:
            # Maps that end a branch, and norms on the stream.
            axes[name] = (0,)
    return axes


def _head_axes(model: spec.Model) -> dict[str, tuple[int, ...]]:
    """The same for a head: up to its first map, and where a later one is the word table, up to that."""
    axes: dict[str, tuple[int, ...]] = {}
    layers = model.head.layers if model.head else ()
    last = max((i for i, one in enumerate(layers) if isinstance(one, spec.Linear) and one.weight), default=-1)
    for index, layer in enumerate(layers):
        address = f"head.layers.{index}"
        if isinstance(layer, spec.Linear) and index >= last:
            axes[f"{address}.weight"] = (1,)
            break
        axes |= {f"{address}.weight": (0, 1) if isinstance(layer, spec.Linear) else (0,), f"{address}.bias": (0,)}
    return axes
