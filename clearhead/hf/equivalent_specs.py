"""Equivalent specs: other specs that compute the same, tried where no config of a family can express a spec.

The residual stream has no order of its own: where all that writes it and all that reads it is permuted alike, nothing
changes but the order of sums, so interleaved sines and cosines can become halves. An absent bias is a bias of zeros,
and the embedding scale can be folded into the token embedding. Legend: D width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from clearhead import spec
from clearhead.core import Transformer
from clearhead.weights.fill import built


def equivalent_modules(module: Transformer) -> Iterator[Transformer]:
    """Yield a module, and then modules with equivalent specs, which compute the same up to the order of sums.

    Those that change less come first; dropout, which changes training only, is dropped last.
    """
    yield module
    changes = (with_halves, with_output_bias, with_folded_scale, without_dropout)
    for count in range(1, len(changes) + 1):
        for chosen in itertools.combinations(changes, count):
            form: Transformer | None = module
            for change in chosen:
                form = None if form is None else change(form)
            if form is not None:
                yield form


def without_dropout(module: Transformer) -> Transformer | None:
    """Return the module without dropout; None: it has none."""

    def change(_path: str, node: spec.Node) -> spec.Node:
        return node.model_copy(update={"dropout": 0.0}) if getattr(node, "dropout", 0.0) else node

    model = spec.map_nodes(module.spec, change)
    return None if model == module.spec else built(model, module.state_dict(), training=module.training)


def with_folded_scale(module: Transformer) -> Transformer | None:
    """Return the module with its embedding scales folded into the token embeddings.

    Returns:
        The module, with its own weight for an output that was tied to such a table; None: nothing is scaled, or stacks
        that share a table scale it differently.
    """
    stacks = {name: stack for name in ("encoder", "decoder") if (stack := getattr(module.spec, name)) is not None}
    scales: dict[str, set[float]] = {}
    for name, stack in stacks.items():
        table = stack.embedding.table
        owner = table.path if isinstance(table, spec.Reference) else f"{name}.embedding.table"
        scales.setdefault(owner, set()).add(stack.embedding.scale)
        if stack.embedding.scale_rounding != "none":
            return None
    scaled = {owner for owner, found in scales.items() if found != {1.0}}
    if not scaled or any(len(found) > 1 for found in scales.values()):
        return None
    update: dict[str, object] = {
        name: stack.model_copy(update={"embedding": stack.embedding.model_copy(update={"scale": 1.0})})
        for name, stack in stacks.items()
    }
    tensors = dict(module.state_dict())
    head = module.spec.head
    if head is not None:
        layers = list(head.layers)
        for index, layer in enumerate(layers):
            if isinstance(layer, spec.Linear) and layer.weight is not None and layer.weight.path in scaled:
                layers[index] = layer.model_copy(update={"weight": None})
                tensors[f"head.layers.{index}.weight"] = tensors[f"{layer.weight.path}.weight"]
        update["head"] = head.model_copy(update={"layers": tuple(layers)})
    for owner in scaled:
        (scale,) = scales[owner]
        tensors[f"{owner}.weight"] = tensors[f"{owner}.weight"] * scale
    return built(module.spec.model_copy(update=update), tensors, training=module.training)


def with_output_bias(module: Transformer) -> Transformer | None:
    """Return the module with a bias of zeros in its head's last linear layer; None: there is none without a bias."""
    head = module.spec.head
    last = head.layers[-1] if head is not None else None
    if head is None or not isinstance(last, spec.Linear) or last.bias:
        return None
    layers = (*head.layers[:-1], last.model_copy(update={"bias": True}))
    model = module.spec.model_copy(update={"head": head.model_copy(update={"layers": layers})})
    like = next(module.parameters())
    zeros = {f"head.layers.{len(layers) - 1}.bias": torch.zeros(last.size, dtype=like.dtype, device=like.device)}
    return built(model, dict(module.state_dict()) | zeros, training=module.training)


def with_halves(module: Transformer) -> Transformer | None:
    """Return the module with all sines of its sinusoidal positions before all cosines.

    Returns:
        The module; None: a stack has other positions than interleaved ones, or a part that depends on the order of the
        stream.
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
    """Whether the stream of a stack has the width of its table, and no part depends on its order."""
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
    """Return, for each tensor that reads or writes the stream, the axes of the stream."""
    axes = _head_axes(module.spec)
    for name in module.state_dict():
        *place, leaf = name.split(".")
        if place[0] == "head" or place[-1] in ("query_norm", "key_norm", "score_table", "score_bias") or leaf == "sink":
            continue
        if place[-1] in ("table", "segments", "query", "key", "value", "up", "gate"):
            axes |= {name: (1,)} if leaf == "weight" else {}
        else:
            # The last linear layers of branches, and norms on the stream.
            axes[name] = (0,)
    return axes


def _head_axes(model: spec.Model) -> dict[str, tuple[int, ...]]:
    """The same for a head: up to its first linear layer, and where a later one is tied, up to that."""
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
