"""Equivalent specs: other specs that compute the same, tried where no config of a family can express a spec.

The residual stream has no order of its own: where all that writes it and all that reads it is permuted alike, nothing
changes but the order of sums, so interleaved sines and cosines can become halves. An absent bias is a bias of zeros;
the scale of the embedding can be part of its table, and that of the scores part of the queries' projection. Legend:
D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from clearhead import spec
from clearhead.checkpoints.weights.fill import built
from clearhead.core import Transformer

Tensors = Mapping[str, Tensor]
Equivalent = tuple[spec.Model, Callable[[Tensors], dict[str, Tensor]]]
"""An equivalent spec, and what turns the tensors of the first spec into those of this one."""
Change = Callable[[spec.Model], Equivalent | None]
"""From a spec to an equivalent one; None: the change does not apply."""


def changed(module: Transformer, changes: Iterable[Change]) -> Transformer:
    """Return a module after changes that apply to it, one after the other; tensors are copied where they change."""
    model, tensors = module.spec, dict(module.state_dict())
    for change in changes:
        found = change(model)
        assert found is not None, "a change that was chosen applies"
        model, convert = found
        tensors = convert(tensors)
    return module if model == module.spec else built(model, tensors, training=module.training)


def without_dropout(model: spec.Model) -> Equivalent | None:
    """Dropout, which changes training only, is left out; None: there is none."""

    def change(_path: str, node: spec.Node) -> spec.Node:
        return node.model_copy(update={"dropout": 0.0}) if getattr(node, "dropout", 0.0) else node

    other = spec.map_nodes(model, change)
    return None if other == model else (other, dict)


def with_scaled_output(model: spec.Model) -> Equivalent | None:
    """The scale of the embedding becomes part of its table, and an output that is tied to it is scaled down again.

    None: nothing is scaled, or not every use of a table alike, or no output is tied to it.
    """
    scales = _table_scales(model)
    head = model.head
    if not scales or head is None:
        return None
    layers = tuple(
        layer.model_copy(update={"scale": layer.scale / scales[layer.weight.path]})
        if isinstance(layer, spec.Linear) and layer.weight is not None and layer.weight.path in scales
        else layer
        for layer in head.layers
    )
    if layers == head.layers:
        return None
    other = _without_scale(model).model_copy(update={"head": head.model_copy(update={"layers": layers})})
    return other, lambda tensors: _scaled_tables(tensors, scales)


def with_folded_scale(model: spec.Model) -> Equivalent | None:
    """The scale of the embedding becomes part of its table, and an output that was tied to it has its own weight.

    None: nothing is scaled, or not every use of a table alike.
    """
    scales = _table_scales(model)
    if not scales:
        return None
    other, copies = _without_scale(model), {}
    if model.head is not None:
        layers = list(model.head.layers)
        for index, layer in enumerate(layers):
            if isinstance(layer, spec.Linear) and layer.weight is not None and layer.weight.path in scales:
                layers[index] = layer.model_copy(update={"weight": None})
                copies[f"head.layers.{index}.weight"] = f"{layer.weight.path}.weight"
        other = other.model_copy(update={"head": model.head.model_copy(update={"layers": tuple(layers)})})

    def convert(tensors: Tensors) -> dict[str, Tensor]:
        return _scaled_tables(tensors, scales) | {name: tensors[table] for name, table in copies.items()}

    return other, convert


def _table_scales(model: spec.Model) -> dict[str, float]:
    """The scale of each table that is scaled; none where its uses differ, or where a scale is rounded."""
    scales: dict[str, set[float]] = {}
    for name, stack in model.stacks.items():
        table = stack.embedding.table
        owner = table.path if isinstance(table, spec.Reference) else f"{name}.embedding.table"
        scales.setdefault(owner, set()).add(stack.embedding.scale)
        if stack.embedding.scale_rounding != "none":
            return {}
    if any(len(found) > 1 for found in scales.values()):
        return {}
    return {owner: scale for owner, found in scales.items() for scale in found if scale != 1.0}


def _without_scale(model: spec.Model) -> spec.Model:
    return model.model_copy(
        update={
            name: stack.model_copy(update={"embedding": stack.embedding.model_copy(update={"scale": 1.0})})
            for name, stack in model.stacks.items()
        }
    )


def _scaled_tables(tensors: Tensors, scales: Mapping[str, float]) -> dict[str, Tensor]:
    return dict(tensors) | {f"{table}.weight": tensors[f"{table}.weight"] * scale for table, scale in scales.items()}


def with_unscaled_scores(model: spec.Model) -> Equivalent | None:
    """The scale of the attention scores becomes part of the projection of queries.

    None: no scores are scaled, or what follows that projection is not linear.
    """
    scales: dict[str, float] = {}

    def change(path: str, node: spec.Node) -> spec.Node:
        if not isinstance(node, spec.Attention):
            return node
        scales[path] = node.head_size**-0.5 if node.scale is None else node.scale
        return node.model_copy(update={"scale": 1.0})

    other = spec.map_nodes(model, change)
    attentions = [node for _, node in spec.walk(model) if isinstance(node, spec.Attention)]
    is_linear = all(
        one.query_key_norm is None and one.clip is None and not isinstance(one.score_bias, spec.Disentangled)
        for one in attentions
    )
    if not is_linear or all(scale == 1.0 for scale in scales.values()):
        return None

    def convert(tensors: Tensors) -> dict[str, Tensor]:
        own = {f"{path}.query.{leaf}": scale for path, scale in scales.items() for leaf in ("weight", "bias")}
        return {name: tensor * own[name] if name in own else tensor for name, tensor in tensors.items()}

    return other, convert


def with_output_bias(model: spec.Model) -> Equivalent | None:
    """The head's last linear layer has a bias of zeros; None: there is none without a bias."""
    head = model.head
    last = head.layers[-1] if head is not None else None
    if head is None or not isinstance(last, spec.Linear) or last.bias:
        return None
    layers = (*head.layers[:-1], last.model_copy(update={"bias": True}))

    def convert(tensors: Tensors) -> dict[str, Tensor]:
        like = next(iter(tensors.values()))
        zeros = torch.zeros(last.size, dtype=like.dtype, device=like.device)
        return {**tensors, f"head.layers.{len(layers) - 1}.bias": zeros}

    return model.model_copy(update={"head": head.model_copy(update={"layers": layers})}), convert


def with_halves(model: spec.Model) -> Equivalent | None:
    """All sines of sinusoidal positions come before all cosines.

    None: a stack has other positions than interleaved ones, or a part that depends on the order of the stream.
    """
    stacks = model.stacks
    if not all(_is_plain(stack) for stack in stacks.values()) or len({one.width for one in stacks.values()}) > 1:
        return None
    width = next(iter(stacks.values())).width
    order_D = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    update: dict[str, spec.Stack] = {}
    for name, stack in stacks.items():
        assert isinstance(stack.embedding.position, spec.Sinusoidal), "a plain stack has sinusoidal positions"
        position = stack.embedding.position.model_copy(update={"layout": "halves"})
        update[name] = stack.model_copy(update={"embedding": stack.embedding.model_copy(update={"position": position})})

    def convert(tensors: Tensors) -> dict[str, Tensor]:
        axes, found = _stream_axes(model, tensors), dict(tensors)
        for name, tensor in tensors.items():
            for axis in axes.get(name, ()):
                tensor = tensor.index_select(axis, order_D.to(tensor.device))
            found[name] = tensor
        return found

    return model.model_copy(update=update), convert


def _is_plain(stack: spec.Stack) -> bool:
    """Whether the stream of a stack has the width of its table, and no part depends on its order."""
    position = stack.embedding.position
    functions = [branch.function for layer in stack.layers for step in layer.steps for branch in step.branches]
    return (
        isinstance(position, spec.Sinusoidal)
        and position.layout == "interleaved"
        and stack.embedding.width is None
        and all(
            isinstance(one, spec.FeedForward)
            or (isinstance(one, spec.Attention) and not isinstance(one.score_bias, spec.Disentangled))
            for one in functions
        )
    )


def _stream_axes(model: spec.Model, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return, for each tensor that reads or writes the stream, the axes of the stream."""
    axes = _head_axes(model)
    for name in names:
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


CHANGES: tuple[Change, ...] = (
    with_halves,
    with_output_bias,
    with_scaled_output,
    with_folded_scale,
    with_unscaled_scores,
    without_dropout,
)
"""In the order in which they are tried; those that change least come first."""
