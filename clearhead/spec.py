"""What a model is: a frozen tree of sum types, validated whole, written to JSON and read back.

The tree mirrors the modules: the path of a node (`encoder.layers.0.steps.1.branches.0.function`) is the path of the
module built from it and the prefix of its weights. What is shared has one owner and `Reference`s to it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clearhead.errors import InputError, nearest

Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Node(BaseModel):
    """A part of a spec: immutable, comparable, hashable."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError.from_faults(_sentences(error, type(self)), subject=type(self).__name__) from None

    # Marks the constructor as pydantic's own, so that nested nodes are validated in one pass and report together.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


AnyNode = TypeVar("AnyNode", bound=Node)


class Reference(Node):
    """A tensor or table owned by another module, named by that module's path."""

    kind: Literal["reference"] = "reference"
    path: str


# --- norms ----------------------------------------------------------------------------------------------------


class LayerNorm(Node):
    """Layer normalisation. Source: arXiv 1607.06450, eq. 3."""

    kind: Literal["layer_norm"] = "layer_norm"
    eps: Positive = 1e-5
    bias: bool = True


class RMSNorm(Node):
    """Root-mean-square normalisation. Source: arXiv 1910.07467, eq. 4."""

    kind: Literal["rms_norm"] = "rms_norm"
    eps: Positive = 1e-6


Norm = Annotated[LayerNorm | RMSNorm, Field(discriminator="kind")]

# --- positions: at the embedding, on query and key, on the scores ---------------------------------------------


class Sinusoidal(Node):
    """Fixed sines and cosines added to the embedding. Source: arXiv 1706.03762, section 3.5."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    layout: Literal["interleaved", "halves"] = "interleaved"
    theta: Positive = 10000.0
    offset: Annotated[int, Field(ge=0)] = 0


class Learned(Node):
    """A trained table added to the embedding; the row of a token is its position plus the offset."""

    kind: Literal["learned"] = "learned"
    rows: Count
    offset: Annotated[int, Field(ge=0)] = 0


class Rotary(Node):
    """Rotation of query and key by position, first half paired with second half. Source: arXiv 2104.09864."""

    kind: Literal["rotary"] = "rotary"
    theta: Positive = 10000.0
    size: Count | None = None  # rotated dimensions of a head, from the first; None: all of them


class Alibi(Node):
    """A penalty on the scores linear in distance. Source: arXiv 2108.12409, section 3."""

    kind: Literal["alibi"] = "alibi"


class RelativeBuckets(Node):
    """A trained score bias for each bucket of relative distance. Source: arXiv 1910.10683, section 2.1."""

    kind: Literal["relative_buckets"] = "relative_buckets"
    num_heads: Count
    count: Annotated[int, Field(ge=4)] = 32
    max_distance: Count = 128
    bidirectional: bool


EmbeddingPosition = Annotated[Sinusoidal | Learned, Field(discriminator="kind")]
ScoreBias = Annotated[Alibi | RelativeBuckets | Reference, Field(discriminator="kind")]

# --- masks ----------------------------------------------------------------------------------------------------


class Full(Node):
    """Every position may attend to every real position."""

    kind: Literal["full"] = "full"


class Causal(Node):
    """A position may attend to itself and to what is before it."""

    kind: Literal["causal"] = "causal"


class Window(Node):
    """A position may attend to at most `before` positions before it and `after` positions after it, and to itself."""

    kind: Literal["window"] = "window"
    before: Annotated[int, Field(ge=0)]
    after: Annotated[int, Field(ge=0)]


Mask = Annotated[Full | Causal | Window, Field(discriminator="kind")]

# --- the functions of a residual branch -----------------------------------------------------------------------


class Biases(Node):
    """Which of the four projections of attention have a bias."""

    query: bool = True
    key: bool = True
    value: bool = True
    out: bool = True


class Attention(Node):
    """Multi-head attention over the stream itself or over the memory. Source: arXiv 1706.03762, section 3.2."""

    kind: Literal["attention"] = "attention"
    source: Literal["self", "memory"] = "self"
    num_heads: Count
    num_kv_heads: Count
    head_size: Count
    mask: Mask = Full()
    position: Rotary | None = None
    score_bias: ScoreBias | None = None
    scale: Positive | None = None  # None: head_size ** -0.5
    bias: Biases = Biases()
    query_key_norm: Norm | None = None  # over each head, before any rotation
    dropout: Rate = 0.0


class FeedForward(Node):
    """A position-wise network with one inner layer. Source: arXiv 1706.03762, section 3.3; gates: arXiv 2002.05202."""

    kind: Literal["feed_forward"] = "feed_forward"
    size: Count
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    gated: bool = False
    bias_in: bool = True
    bias_out: bool = True
    dropout: Rate = 0.0


Function = Annotated[Attention | FeedForward, Field(discriminator="kind")]

# --- the residual equation ------------------------------------------------------------------------------------


class Branch(Node):
    """One term of the residual sum: scale * dropout(post(function(pre(x))))."""

    function: Function
    pre: Norm | None = None
    post: Norm | None = None
    scale: Positive = 1.0
    dropout: Rate = 0.0


class Step(Node):
    """One residual step: x <- out(x + sum of the branches of pre(x))."""

    branches: Annotated[tuple[Branch, ...], Field(min_length=1)]
    pre: Norm | None = None
    out: Norm | None = None


class Layer(Node):
    """The residual steps that repeat through a stack."""

    steps: Annotated[tuple[Step, ...], Field(min_length=1)]


# --- embedding, head, stack, model ----------------------------------------------------------------------------


class Table(Node):
    """A trained table with a row for each vocabulary entry."""

    kind: Literal["table"] = "table"
    rows: Count


class Embedding(Node):
    """Ids to vectors: table * scale, plus segments and position, then norm, then dropout."""

    table: Annotated[Table | Reference, Field(discriminator="kind")]
    scale: Positive = 1.0
    num_segments: Annotated[int, Field(ge=0)] = 0
    position: EmbeddingPosition | None = None
    norm: Norm | None = None
    dropout: Rate = 0.0


class Linear(Node):
    """An affine map of a head; its weight is its own or a table it is tied to."""

    kind: Literal["linear"] = "linear"
    size: Count
    bias: bool = True
    weight: Reference | None = None
    scale: Positive = 1.0  # multiplies the states that enter


class Activation(Node):
    """A pointwise function of a head."""

    kind: Literal["activation"] = "activation"
    function: Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]


HeadLayer = Annotated[Linear | Activation | LayerNorm | RMSNorm, Field(discriminator="kind")]


class Head(Node):
    """What turns states into outputs: a list of layers, the last of them linear."""

    layers: Annotated[tuple[HeadLayer, ...], Field(min_length=1)]


class Stack(Node):
    """An embedding and the layers above it."""

    width: Count
    embedding: Embedding
    layers: tuple[Layer, ...]
    final_norm: Norm | None = None
    score_table: RelativeBuckets | None = None


class Xavier(Node):
    """Glorot-uniform matrices and N(0, 1/width) tables, as in the original implementation of arXiv 1706.03762."""

    kind: Literal["xavier"] = "xavier"


class Normal(Node):
    """N(0, std^2) everywhere; the maps that end a branch are divided by the square root of the number of branches."""

    kind: Literal["normal"] = "normal"
    std: Positive = 0.02
    scale_branches: bool = True


class Model(Node):
    """A whole Transformer: an encoder, a decoder, or both, and the head."""

    encoder: Stack | None = None
    decoder: Stack | None = None
    head: Head | None = None
    initialization: Annotated[Xavier | Normal, Field(discriminator="kind")] = Xavier()

    def to_json(self) -> str:
        """Write the tree as JSON; each distinct layer of a stack is written once."""
        tree = self.model_dump(mode="json")
        for name in ("encoder", "decoder"):
            if tree[name] is not None:
                tree[name]["layers"] = _fold(tree[name]["layers"])
        return json.dumps(tree, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Model:
        """Read what `to_json` wrote.

        Raises:
            InputError: with every fault of shape, type and consistency in one report.
        """
        try:
            tree = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"the spec is not JSON: {error.msg} at line {error.lineno}") from None
        if not isinstance(tree, dict):
            raise InputError(f"the spec must be a JSON object, got {type(tree).__name__}")
        for name in ("encoder", "decoder"):
            if isinstance(tree.get(name), dict):
                tree[name]["layers"] = _unfold(tree[name].get("layers"))
        faults: list[str] = []
        model = None
        try:
            model = cls.model_validate_json(json.dumps(tree))
        except ValidationError as error:
            faults += _sentences(error, cls)
        faults += consistency_faults(model) if model is not None else list(_partial_faults(tree, ""))
        if faults or model is None:
            raise InputError.from_faults(list(dict.fromkeys(faults)), subject="the spec")
        return model


# --- rules across fields: plain functions over what parsed ----------------------------------------------------


def validate(node: AnyNode) -> AnyNode:
    """Return the node, or raise one `InputError` that lists everything inconsistent in it."""
    faults = consistency_faults(node) if isinstance(node, Model) else _node_faults(node, "")
    if faults:
        raise InputError.from_faults(faults, subject="the spec")
    return node


def consistency_faults(model: Model) -> list[str]:
    """List what no single field can show: sizes that do not fit together and references that lead nowhere."""
    faults: list[str] = []
    for path, node in walk(model):
        faults += _node_faults(node, path)
    if model.encoder is None and model.decoder is None:
        faults.append("a model needs an encoder, a decoder or both; got neither")
    faults += _memory_faults(model) + _reference_faults(model)
    if model.head is not None and model.head.layers[-1].kind != "linear":
        faults.append(f"head.layers: the last layer must be linear, got {model.head.layers[-1].kind}")
    return faults


def walk(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield every node below with its path, parents first; indices are path parts, as in module names."""
    yield path, node
    for name in type(node).model_fields:
        value = getattr(node, name)
        for suffix, child in enumerate(value) if isinstance(value, tuple) else [("", value)]:
            if isinstance(child, Node):
                yield from walk(child, ".".join(part for part in (path, name, str(suffix)) if part))


def _node_faults(node: Node, path: str) -> list[str]:
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


# --- reading --------------------------------------------------------------------------------------------------

_TAGGED: dict[str, type[Node]] = {"attention": Attention, "relative_buckets": RelativeBuckets}


def _partial_faults(tree: Any, path: str) -> Iterator[str]:
    """Apply the rules to the nodes that parse by themselves, so that a typing fault elsewhere does not hide theirs."""
    if isinstance(tree, dict):
        node_type = _TAGGED.get(str(tree.get("kind")), Stack if "layers" in tree and "width" in tree else None)
        if node_type is not None:
            with contextlib.suppress(ValidationError):  # reported by the validation of the whole
                yield from _node_faults(node_type.model_validate_json(json.dumps(tree)), path)
        for key, value in tree.items():
            yield from _partial_faults(value, f"{path}.{key}" if path else key)
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _partial_faults(value, f"{path}.{index}")


def _sentences(error: ValidationError, root: type[Node]) -> list[str]:
    """Say each fault that pydantic found in the words of the spec."""
    return [_sentence(dict(fault), root) for fault in error.errors(include_url=False)]


def _sentence(fault: dict[str, Any], root: type[Node]) -> str:
    location = [str(part) for part in fault["loc"]]
    path = ".".join(part for part in location if part not in _TAGS) or root.__name__
    received = fault["input"]
    if fault["type"] == "extra_forbidden":
        return f"{path}: unknown key{nearest(location[-1], _FIELDS)}"
    if fault["type"] == "missing":
        return f"{path}: missing"
    if fault["type"] == "union_tag_invalid":
        expected = fault["ctx"]["expected_tags"]
        return (
            f"{path}: kind must be one of {expected}; got '{fault['ctx']['tag']}'{nearest(fault['ctx']['tag'], _TAGS)}"
        )
    shown = received if isinstance(received, str | int | float | bool) or received is None else type(received).__name__
    message = fault["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"{path}: expected {message}, got {shown!r}"


def _nodes(base: type[Node] = Node) -> Iterator[type[Node]]:
    for node in base.__subclasses__():
        yield node
        yield from _nodes(node)


_TAGS = frozenset(str(node.model_fields["kind"].default) for node in _nodes() if "kind" in node.model_fields)
_FIELDS = frozenset(field for node in _nodes() for field in node.model_fields)


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
        return layers
    distinct, order = layers.get("distinct"), layers.get("order")
    if not isinstance(distinct, list) or not isinstance(order, list):
        raise InputError("layers must hold 'distinct' (a list of layers) and 'order' (a list of their indices)")
    wrong = [index for index in order if not isinstance(index, int) or not 0 <= index < len(distinct)]
    if wrong:
        raise InputError(f"layers.order: {wrong[0]!r} is not an index of the {len(distinct)} distinct layers")
    return [distinct[index] for index in order]
