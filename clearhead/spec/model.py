"""Root node of a spec (`Model`), checks of the consistency between its nodes, and its JSON format."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError, did_you_mean, within
from clearhead.spec.base import MAX_LAYERS, AnyNode, Count, Node, Reference
from clearhead.spec.node_checks import node_faults
from clearhead.spec.nodes import (
    Attention,
    FeedForward,
    Head,
    Linear,
    MixtureOfExperts,
    Normal,
    Stack,
    Table,
    Xavier,
)
from clearhead.spec.positions import Disentangled, DistanceTable, Learned, RelativeBuckets, Rotary
from clearhead.spec.pydantic_errors import error_messages
from clearhead.spec.registry import RequiredPart, refuse_absent_parts, required_parts
from clearhead.spec.traversal import walk


class Model(Node):
    """Spec of a Transformer: an encoder, a decoder, or both, and a head."""

    encoder: Stack | None = None
    decoder: Stack | None = None
    head: Head | None = None
    initialization: Annotated[Xavier | Normal, Field(discriminator="kind")] = Xavier()
    declared_length: Count | None = None  # max_position_embeddings of a checkpoint that computes its positions

    @property
    def num_outputs(self) -> int | None:
        """Number of outputs of the last linear layer of the head; None if it has no linear layer."""
        layers = self.head.layers if self.head is not None else ()
        return next((layer.size for layer in reversed(layers) if isinstance(layer, Linear)), None)

    @property
    def stacks(self) -> dict[Literal["encoder", "decoder"], Stack]:
        """The stacks by name, in the order of execution."""
        both: dict[Literal["encoder", "decoder"], Stack | None] = {"encoder": self.encoder, "decoder": self.decoder}
        return {name: stack for name, stack in both.items() if stack is not None}

    @property
    def position_limit(self) -> int | None:
        """Maximum sequence length in tokens, from position tables and the declared length; None means no limit."""
        positions = [stack.embedding.position for stack in self.stacks.values()]
        limits = [position.rows - position.offset for position in positions if isinstance(position, Learned)]
        if self.declared_length is not None:
            # Layers with a window may scale their rotation differently, but every layer must reach the limit.
            rotations = [node for _, node in walk(self) if isinstance(node, Rotary)]
            reached = [rotation.extended_length(self.declared_length) for rotation in rotations]
            limits.append(min(reached, default=self.declared_length))
        return min(limits, default=None)

    @property
    def family(self) -> Literal["encoder", "decoder", "encoder-decoder"]:
        """The family of the model, named after its stacks: "encoder", "decoder" or "encoder-decoder"."""
        if self.encoder is None:
            return "decoder"
        return "encoder" if self.decoder is None else "encoder-decoder"

    def to_json(self) -> str:
        """Return the spec as JSON text, with each distinct layer of a stack written once."""
        tree = self.model_dump(mode="json")
        if self.declared_length is None:
            del tree["declared_length"]
        if needed := required_parts(self):
            tree["needs"] = needed
        for name in ("encoder", "decoder"):
            if tree[name] is not None:
                tree[name]["layers"] = _fold(tree[name]["layers"])
        return json.dumps(tree, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Model:
        """Return the spec in a JSON text that `to_json` wrote.

        Raises:
            InputError: the text is faulty; one report names all errors of structure, type and consistency.
        """
        from clearhead.base.files import (
            LARGEST_JSON,
            convert_json,
            parse_json,
        )  # not needed to build a spec from nodes

        if len(text) > LARGEST_JSON:
            raise InputError(f"the spec has {len(text):,} characters; at most {LARGEST_JSON:,} are allowed")
        try:
            tree = parse_json(text)
        except json.JSONDecodeError as error:
            raise InputError(f"the spec is not JSON: {error.msg} at line {error.lineno}") from None
        if not isinstance(tree, dict):
            raise InputError(f"the spec must be a JSON object, got {type(tree).__name__}")
        if (needed := tree.pop("needs", None)) is not None:
            refuse_absent_parts(convert_json(needed, list[RequiredPart], name="the spec: needs"))
        for name in ("encoder", "decoder"):
            if isinstance(tree.get(name), dict):
                tree[name]["layers"] = _unfold(tree[name].get("layers"))
                if tree[name].get("projection_out", True) is None:
                    del tree[name]["projection_out"]  # a field that earlier versions wrote; only OPT-350m used it
        faults: list[str] = []
        model = None
        try:
            model = cls.model_validate_json(json.dumps(tree))
        except ValidationError as error:
            faults += error_messages(error, cls)
        faults += consistency_faults(model) if model is not None else list(partial_faults(tree, ""))
        if faults or model is None:
            raise InputError.from_faults(list(dict.fromkeys(faults)), subject="the spec")
        return model

    @classmethod
    def from_file(cls, path: Path, what: str = "a spec") -> Model:
        """Return the spec in a JSON file that `to_json` wrote.

        Args:
            path: the path of the file.
            what: the expected content, for messages, such as "a spec".

        Raises:
            InputError: the file cannot be read, see `read_model_text`, or the spec is faulty.
        """
        from clearhead.base.files import read_model_text

        text = read_model_text(path, what=what)
        with within(str(path)):
            return cls.from_json(text)


@check_types
def validate(node: AnyNode) -> AnyNode:
    """Return the node unchanged, or raise one `InputError` that lists all its inconsistencies."""
    faults = consistency_faults(node) if isinstance(node, Model) else node_faults(node, "")
    if faults:
        raise InputError.from_faults(faults, subject="the spec")
    return node


def _fold(layers: list[Any]) -> dict[str, Any]:
    distinct: list[Any] = []
    order = []
    for layer in layers:
        if layer not in distinct:
            distinct.append(layer)
        order.append(distinct.index(layer))
    return {"distinct": distinct, "order": order}


def _unfold(layers: Any) -> Any:
    if not isinstance(layers, dict):
        if isinstance(layers, list) and len(layers) > MAX_LAYERS:
            raise InputError(f"layers: {len(layers)} layers are too many; at most {MAX_LAYERS} are supported")
        return layers
    distinct, order = layers.get("distinct"), layers.get("order")
    if not isinstance(distinct, list) or not isinstance(order, list):
        raise InputError("layers must hold 'distinct' (a list of layers) and 'order' (a list of their indices)")
    if len(order) > MAX_LAYERS:
        raise InputError(f"layers.order: {len(order)} layers are too many; at most {MAX_LAYERS} are supported")
    wrong = [index for index in order if not isinstance(index, int) or not 0 <= index < len(distinct)]
    if wrong:
        raise InputError(f"layers.order: {wrong[0]!r} is not an index of the {len(distinct)} distinct layers")
    return [distinct[index] for index in order]


# --- checks across fields and nodes, so that no error hides another ------------------------------------------


@check_types
def consistency_faults(model: Model) -> list[str]:
    """Return all inconsistencies of a spec: sizes that do not fit together, and references without a table."""
    faults: list[str] = []
    for path, node in walk(model):
        faults += node_faults(node, path)
    if model.encoder is None and model.decoder is None:
        faults.append("a model needs an encoder, a decoder or both; got neither")
    return faults + _memory_faults(model) + _reference_faults(model) + _head_faults(model)


def _memory_faults(model: Model) -> list[str]:
    faults, attends = [], False
    for path, node in walk(model):
        if isinstance(node, Attention) and node.source == "memory":
            attends = True
            if path.startswith("encoder"):
                faults.append(f"{path}: an encoder cannot attend to the memory, which is its own output")
            elif model.encoder is None:
                faults.append(f"{path}: attends to the memory, but the model has no encoder")
    if model.encoder and model.decoder and not attends:
        faults.append(
            "decoder: no step attends to the memory, so the encoder has no effect; add cross-attention, or remove "
            "the encoder"
        )
    return faults


def _reference_faults(model: Model) -> list[str]:
    nodes = dict(walk(model))
    tables = {path: node for path, node in nodes.items() if isinstance(node, Table | RelativeBuckets | DistanceTable)}
    faults = []
    for path, node in nodes.items():
        if not isinstance(node, Reference):
            continue
        table, user = tables.get(node.path), nodes[path.rpartition(".")[0]]
        if table is None:
            faults.append(f"{path}: no table at '{node.path}'{did_you_mean(node.path, tables)}")
        elif not isinstance(table, _kind_of_table(user)):
            faults.append(f"{path}: '{node.path}' is a table of the wrong kind for this field")
        elif isinstance(table, RelativeBuckets):
            if isinstance(user, Attention) and table.num_heads != user.num_heads:
                faults.append(
                    f"{path}: '{node.path}' has {table.num_heads} heads, but the attention has {user.num_heads}"
                )
        else:
            faults += [f"{path}: '{node.path}' {fault}" for fault in _stack_faults(model, table, node.path, path)]
    for index, layer in enumerate(model.head.layers if model.head else ()):
        if isinstance(layer, Linear) and layer.weight:
            table = tables.get(layer.weight.path)
            if isinstance(table, Table) and table.rows != layer.size:
                faults.append(
                    f"head.layers.{index}: size {layer.size} differs from the {table.rows} rows of the tied table"
                )
    return faults


def _kind_of_table(user: Node) -> type[Table | RelativeBuckets | DistanceTable]:
    """Return the class of table that the references of a node must lead to."""
    match user:
        case Attention():
            return RelativeBuckets
        case Disentangled():
            return DistanceTable
    return Table


def _stack_faults(model: Model, table: Node, owner: str, user: str) -> Iterator[str]:
    """Yield faults of a shared table: `owner` is the path of the table, `user` the path of the reference to it."""
    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    stack, users_stack = stacks[owner.split(".")[0]], stacks.get(user.split(".")[0])
    assert stack is not None, "the stack has a table"
    if isinstance(table, DistanceTable) and users_stack is not stack:
        yield "belongs to another stack; a distance table cannot be shared between stacks"
    if isinstance(table, Table):
        # A word table is as wide as the embedding of its stack.
        width = _head_widths(model).get(user, 0) if users_stack is None else users_stack.table_width
        if stack.table_width != width:
            yield f"has width {stack.table_width}, but {width} is needed"


def _head_widths(model: Model) -> dict[str, int]:
    """Return the input width of each tied linear layer of the head, by the path of its reference."""
    top, widths = model.decoder or model.encoder, {}
    if model.head is not None and top is not None:
        for index, layer in enumerate(model.head.layers):
            if isinstance(layer, Linear):
                widths[f"head.layers.{index}.weight"] = model.head.output_width(top.width, index)
    return widths


def _head_faults(model: Model) -> list[str]:
    if model.head is None:
        return []
    kinds = [layer.kind for layer in model.head.layers]
    faults = []
    if "pool" not in kinds and (kinds[-2:-1] if kinds[-1] == "soft_cap" else kinds[-1:]) != ["linear"]:
        faults.append(
            f"head.layers: without a pool the last layer must be linear, or a soft_cap after it; got {kinds[-1]}"
        )
    if "soft_cap" in kinds[:-1]:
        faults.append("head.layers: a soft_cap must be the last layer")
    if kinds.count("pool") > 1:
        faults.append(f"head.layers: at most one pool is possible, got {kinds.count('pool')}")
    return faults


_TAGGED: dict[str, type[Node]] = {
    "attention": Attention,
    "relative_buckets": RelativeBuckets,
    "distance_table": DistanceTable,
    "feed_forward": FeedForward,
    "mixture_of_experts": MixtureOfExperts,
}


def partial_faults(tree: Any, path: str) -> Iterator[str]:
    """Yield the faults of every node that parses alone, so that a type error elsewhere does not hide them."""
    if isinstance(tree, dict):
        node_type = _TAGGED.get(str(tree.get("kind")), Stack if "layers" in tree and "width" in tree else None)
        if node_type is not None:
            with contextlib.suppress(ValidationError):  # reported by the validation of the whole tree
                yield from node_faults(node_type.model_validate_json(json.dumps(tree)), path)
        for key, value in tree.items():
            yield from partial_faults(value, f"{path}.{key}" if path else key)
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from partial_faults(value, f"{path}.{index}")
