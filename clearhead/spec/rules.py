"""What no single field can show: plain functions over what parsed, so that no fault hides another."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from clearhead.errors import nearest
from clearhead.spec.nodes import (
    Attention,
    Full,
    Learned,
    Linear,
    Node,
    Reference,
    RelativeBuckets,
    Sinusoidal,
    Stack,
    Table,
)

if TYPE_CHECKING:
    from clearhead.spec.model import Model


def consistency_faults(model: Model) -> list[str]:
    """List what no single field can show: sizes that do not fit together and references that lead nowhere."""
    faults: list[str] = []
    for path, node in walk(model):
        faults += node_faults(node, path)
    if model.encoder is None and model.decoder is None:
        faults.append("a model needs an encoder, a decoder or both; got neither")
    faults += _memory_faults(model) + _reference_faults(model)
    if model.head is not None:
        kinds = [layer.kind for layer in model.head.layers]
        if "pool" not in kinds and kinds[-1] != "linear":
            faults.append(f"head.layers: the last layer must be linear where nothing is pooled, got {kinds[-1]}")
        if kinds.count("pool") > 1:
            faults.append(f"head.layers: a sequence is pooled once, got {kinds.count('pool')} pools")
    return faults


def walk(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield every node below with its path, parents first; indices are path parts, as in module names."""
    yield path, node
    for name in type(node).model_fields:
        value = getattr(node, name)
        for suffix, child in enumerate(value) if isinstance(value, tuple) else [("", value)]:
            if isinstance(child, Node):
                yield from walk(child, ".".join(part for part in (path, name, str(suffix)) if part))


def node_faults(node: Node, path: str) -> list[str]:
    """List what is inconsistent inside one node; `path` is what the messages call it."""
    where = path or type(node).__name__
    faults = []
    if isinstance(node, Attention):
        if node.num_heads % node.num_kv_heads:
            faults.append(f"{where}: num_heads {node.num_heads} is not a multiple of num_kv_heads {node.num_kv_heads}")
        if node.position is not None:
            size = node.head_size if node.position.size is None else node.position.size
            if size % 2 or size > node.head_size:
                faults.append(f"{where}: rotary size must be even and at most head_size {node.head_size}, got {size}")
        if isinstance(node.score_bias, RelativeBuckets) and node.score_bias.num_heads != node.num_heads:
            faults.append(f"{where}: score_bias has {node.score_bias.num_heads} heads, the attention {node.num_heads}")
        if node.source == "memory" and (node.position or node.score_bias or node.mask != Full()):
            faults.append(f"{where}: attention to the memory takes a full mask and no position, for memory has its own")
    if isinstance(node, Stack):
        if isinstance(node.embedding.position, Sinusoidal) and node.width % 2:
            faults.append(f"{where}: sinusoidal positions pair sines with cosines, so width must be even; {node.width}")
        position = node.embedding.position
        if isinstance(position, Learned) and position.rows <= position.offset:
            faults.append(f"{where}: {position.rows} rows of positions leave none after the offset {position.offset}")
    if isinstance(node, RelativeBuckets) and node.bidirectional and node.count % 2:
        faults.append(f"{where}: bidirectional buckets need an even count, got {node.count}")
    if isinstance(node, RelativeBuckets) and node.max_distance <= node.count // (4 if node.bidirectional else 2):
        faults.append(f"{where}: max_distance {node.max_distance} is not above what {node.count} buckets count exactly")
    return faults


def _memory_faults(model: Model) -> list[str]:
    faults, attends = [], False
    for path, node in walk(model):
        if isinstance(node, Attention) and node.source == "memory":
            attends = True
            if path.startswith("encoder"):
                faults.append(f"{path}: an encoder makes the memory and cannot attend to it")
            elif model.encoder is None:
                faults.append(f"{path}: attends to a memory, but the model has no encoder to make one")
    if model.encoder and model.decoder and not attends:
        faults.append("decoder: no step attends to the memory, so the encoder has no effect")
    return faults


def _reference_faults(model: Model) -> list[str]:
    nodes = dict(walk(model))
    tables = {path: node for path, node in nodes.items() if isinstance(node, Table | RelativeBuckets)}
    widths = {name: stack.width for name in ("encoder", "decoder") if (stack := getattr(model, name))}
    top = model.decoder or model.encoder
    faults = []
    for path, node in ((path, node) for path, node in nodes.items() if isinstance(node, Reference)):
        owner = tables.get(node.path)
        if owner is None:
            faults.append(f"{path}: no table at '{node.path}'{nearest(node.path, tables)}")
            continue
        scores = path.endswith("score_bias")
        if scores != isinstance(owner, RelativeBuckets):
            faults.append(f"{path}: '{node.path}' is not the kind of table needed here")
            continue
        asker = nodes[path.rpartition(".")[0]]
        if isinstance(owner, RelativeBuckets) and isinstance(asker, Attention) and owner.num_heads != asker.num_heads:
            faults.append(f"{path}: '{node.path}' has {owner.num_heads} heads, the attention {asker.num_heads}")
        width = widths.get(path.split(".")[0], top.width if top else 0)
        if not scores and widths[node.path.split(".")[0]] != width:
            faults.append(f"{path}: '{node.path}' is {widths[node.path.split('.')[0]]} wide, {width} needed")
    for index, layer in enumerate(model.head.layers if model.head else ()):
        owner = tables.get(layer.weight.path) if isinstance(layer, Linear) and layer.weight else None
        if isinstance(owner, Table) and isinstance(layer, Linear) and owner.rows != layer.size:
            faults.append(f"head.layers.{index}: size {layer.size} differs from the {owner.rows} rows it is tied to")
    return faults


_TAGGED: dict[str, type[Node]] = {"attention": Attention, "relative_buckets": RelativeBuckets}


def partial_faults(tree: Any, path: str) -> Iterator[str]:
    """Apply the rules to the nodes that parse by themselves, so that a typing fault elsewhere does not hide theirs."""
    if isinstance(tree, dict):
        node_type = _TAGGED.get(str(tree.get("kind")), Stack if "layers" in tree and "width" in tree else None)
        if node_type is not None:
            with contextlib.suppress(ValidationError):  # reported by the validation of the whole
                yield from node_faults(node_type.model_validate_json(json.dumps(tree)), path)
        for key, value in tree.items():
            yield from partial_faults(value, f"{path}.{key}" if path else key)
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from partial_faults(value, f"{path}.{index}")
