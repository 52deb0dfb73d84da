"""Texts of the boxes of an architecture drawing, and the groups of repeated layers, from a spec."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from clearhead import spec

Kind = Literal["embedding", "attention", "feed_forward", "norm", "linear", "position"]
Path = str
_ACTIVATIONS = {
    "relu": "ReLU", "gelu": "GELU", "gelu_tanh": "GELU (tanh)", "silu": "SiLU", "relu2": "ReLU squared",
    "quick_gelu": "quick GELU", "tanh": "tanh",
}  # fmt: skip
_POOLS = {
    "first": "first token", "last": "last token", "mean": "mean over tokens", "max": "maximum over tokens",
    "root": "sum over tokens / √tokens", "weighted": "mean with weights 1, 2, 3, …",
}  # fmt: skip
_SCALINGS = {
    "linear_scaling": "linear", "dynamic_scaling": "dynamic", "band_scaling": "by frequency", "yarn_scaling": "YaRN",
    "long_rope_scaling": "LongRoPE",
}  # fmt: skip
# Longest repeating unit of layers, and most layers before it, that are searched.
_LONGEST_UNIT = 32


@dataclass(frozen=True)
class Block:
    """Text of one box of the drawing.

    Args:
        kind: kind of the box, which decides its colour.
        title: first line.
        facts: lines below the title.
        address: address of the node in the spec.
        norms: addresses of the norms that the facts mention.
    """

    kind: Kind
    title: str
    facts: tuple[str, ...] = ()
    address: Path = ""
    norms: tuple[Path, ...] = ()


@dataclass(frozen=True)
class LayerRun:
    """Consecutive equal layers.

    Args:
        layer: index of the first of these layers among the layers of the spec.
        count: number of layers.
    """

    layer: int
    count: int


@dataclass(frozen=True)
class LayerGroup:
    """Repeating unit of layers in a drawing: runs of equal layers, and the number of repeats.

    Args:
        runs: runs of the unit.
        repeats: number of repeats of the unit.
        first, last: depths of the first and last layer of all repeats.
    """

    runs: tuple[LayerRun, ...]
    repeats: int
    first: int
    last: int


# --- repeated layers ------------------------------------------------------------------------------------------


def layer_groups(stack: spec.Stack) -> list[LayerGroup]:
    """Group the layers of a stack so that as few layers as possible are drawn."""
    distinct: dict[spec.Layer, int] = {}
    kinds = [distinct.setdefault(layer, len(distinct)) for layer in stack.depths]
    order = stack.sharing or range(len(stack.layers))
    start, length, repeats = _best_unit(kinds)
    end = start + length * repeats
    unit = [LayerRun(order[start + first], count) for first, count in _runs(kinds[start : start + length])]
    return [
        *_plain_groups(kinds, order, 0, start),
        *([LayerGroup(tuple(unit), repeats, start, end - 1)] if repeats else []),
        *_plain_groups(kinds, order, end, len(kinds)),
    ]


def _best_unit(kinds: Sequence[int]) -> tuple[int, int, int]:
    """Find the repeating unit of layers that shortens the drawing most: its start, length and repeats (0 if none).

    Args:
        kinds: one number per layer; equal layers have equal numbers.
    """
    best, fewest = (0, 0, 0), len(_runs(kinds))
    for start in range(min(len(kinds), _LONGEST_UNIT)):
        for length in range(2, min(len(kinds) - start, _LONGEST_UNIT) + 1):
            unit, repeats = kinds[start : start + length], 1
            while kinds[start + repeats * length : start + (repeats + 1) * length] == unit:
                repeats += 1
            spans = (kinds[:start], unit, kinds[start + repeats * length :])
            drawn = sum(len(_runs(span)) for span in spans)
            if repeats > 1 and drawn < fewest:
                best, fewest = (start, length, repeats), drawn
    return best


def _runs(kinds: Sequence[int]) -> list[tuple[int, int]]:
    """Return the start and the length of each run of equal consecutive layers."""
    runs, start = [], 0
    for _, equal in itertools.groupby(kinds):
        count = len(list(equal))
        runs.append((start, count))
        start += count
    return runs


def _plain_groups(kinds: Sequence[int], order: Sequence[int], start: int, end: int) -> list[LayerGroup]:
    return [
        LayerGroup((LayerRun(order[start + first], 1),), count, start + first, start + first + count - 1)
        for first, count in _runs(kinds[start:end])
    ]


# --- boxes ----------------------------------------------------------------------------------------------------


def format_number(value: float | int) -> str:
    """Format a number for a picture, such as 50,257 or 0.0442."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"


def format_sizes(*values: int) -> str:
    """Format the vector sizes, from input to output, of a linear or feed-forward layer, such as 768 → 3,072 → 768."""
    return " → ".join(map(format_number, values))


def part_block(kind: Kind, node: spec.Part, address: Path) -> Block:
    """Return the box of a custom module: its name and its non-default settings."""
    title = node.kind.replace("_", " ").capitalize()
    return Block(kind, title, tuple(_part_facts(node)), address)


def _part_facts(node: spec.Part) -> Iterator[str]:
    for name, field in type(node).model_fields.items():
        value = getattr(node, name)
        if name != "kind" and value != field.get_default():
            shown = format_number(value) if isinstance(value, float | int) and not isinstance(value, bool) else value
            yield f"{name.replace('_', ' ')} {shown}"


def norm_block(norm: spec.LayerNorm | spec.RMSNorm | spec.Part, address: Path) -> Block:
    """Return the box of a norm."""
    if isinstance(norm, spec.Part):
        return part_block("norm", norm, address)
    notes = [*(["1 + weight"] if norm.unit_offset else []), *([] if norm.weight else ["no weight"])]
    return Block("norm", _norm_name(norm) + (f" ({', '.join(notes)})" if notes else ""), (), address)


def _norm_name(norm: spec.LayerNorm | spec.RMSNorm) -> str:
    return "LayerNorm" if isinstance(norm, spec.LayerNorm) else "RMSNorm"


def function_block(function: spec.Function, width: int, address: Path) -> Block:
    """Return the box of the function of a residual branch, such as attention or a feed-forward network."""
    match function:
        case spec.Attention():
            title = "Self-attention" if function.source == "self" else "Cross-attention"
            norm = function.query_key_norm
            norms = () if norm is None else (f"{address}.query_key_norm.norm",)
            return Block("attention", title, tuple(_attention_facts(function)), address, norms)
        case spec.FeedForward():
            return Block("feed_forward", "Feed-forward", tuple(_feed_forward_facts(function, width)), address)
        case spec.MixtureOfExperts():
            chosen = f"top {function.top_k} of {function.count} experts"
            facts = (chosen, *_feed_forward_facts(function.expert, width))
            return Block("feed_forward", "Mixture of experts", facts, address)
        case spec.Part():
            return part_block("feed_forward", function, address)


def _attention_facts(attention: spec.Attention) -> Iterator[str]:
    heads, shared = attention.num_heads, attention.num_kv_heads
    yield f"{heads} head{'s' * (heads > 1)} of {attention.head_size}"
    if shared != heads:
        yield f"{shared} key/value head{'s' * (shared > 1)}"
    yield from _mask_facts(attention)
    yield from _position_facts(attention)
    if (norm := attention.query_key_norm) is not None:
        scope = "per head" if norm.over == "head" else "over all heads"
        yield f"QK {_norm_name(norm.norm)}, {scope}"
    if attention.scale is not None and abs(attention.scale * attention.head_size**0.5 - 1) > 1e-6:
        yield "scores not scaled" if attention.scale == 1 else f"scores × {format_number(attention.scale)}"
    if attention.soft_cap is not None:
        yield f"soft cap {format_number(attention.soft_cap)}"
    if attention.clip is not None:
        yield f"query, key, value clipped at {format_number(attention.clip)}"
    if attention.sink:
        yield "attention sinks"
    for name, step in (("scores", attention.score_step), ("weights", attention.weight_step)):
        if step is not None:
            yield " ".join([f"{name} by {step.kind.replace('_', ' ')}", *_part_facts(step)])
    bias = attention.bias
    with_bias = [name for name in ("query", "key", "value", "out") if getattr(bias, name)]
    if len(with_bias) < 4:
        yield f"bias: {', '.join(with_bias)}" if with_bias else "no biases"


def _mask_facts(attention: spec.Attention) -> Iterator[str]:
    match attention.mask:
        case spec.Causal():
            yield "causal mask"
        case spec.Window(before=before, after=0):
            yield f"causal window, {format_number(before)} back"
        case spec.Window(before=before, after=after):
            yield f"window, {format_number(before)} back, {format_number(after)} ahead"
        case spec.Full() if attention.source == "self":
            yield "bidirectional"


def _position_facts(attention: spec.Attention) -> Iterator[str]:
    if (rotary := attention.position) is not None:
        extent = f" on {rotary.size} of {attention.head_size}" if rotary.size not in (None, attention.head_size) else ""
        yield f"RoPE{extent}, θ = {format_number(rotary.theta)}"
        if rotary.scaling is not None:
            factor = getattr(rotary.scaling, "factor", None)
            yield f"{_SCALINGS[rotary.scaling.kind]} scaling" + (
                "" if factor is None else f" × {format_number(factor)}"
            )
    match attention.score_bias:
        case spec.Alibi():
            yield "ALiBi"
        case spec.RelativeBuckets() as bias:
            yield f"{bias.count} position buckets"
        case spec.Disentangled() as bias:
            yield from (term.replace("_", " ") for term in bias.terms)
        case spec.Reference():
            yield "position buckets of the stack"


def _feed_forward_facts(function: spec.FeedForward, width: int) -> Iterator[str]:
    yield format_sizes(width, function.size, width)
    form = function.activation
    name = "clamped gate" if isinstance(form, spec.ClampedGate) else _ACTIVATIONS[form]
    yield f"gated {name}" if function.gated and isinstance(form, str) else name
    if not function.bias_in or not function.bias_out:
        yield "no biases" if function.bias_in == function.bias_out else "one bias"


def table_block(model: spec.Model, stack: spec.Stack, address: Path) -> Block:
    """Return the box of the embedding table.

    Args:
        model: spec of the model, which may have the table in another stack.
        stack: stack of the embedding.
        address: address of the embedding.
    """
    embedding, width = stack.embedding, stack.table_width
    tables = _tables(model)
    tied, path = isinstance(embedding.table, spec.Reference), getattr(embedding.table, "path", f"{address}.table")
    facts = [f"{format_number(tables[path].rows)} × {format_number(width)}"]
    if tied:
        facts.append(f"the {path.split('.')[0]}'s table")
    if embedding.scale != 1.0:
        is_root = abs(embedding.scale - width**0.5) < 1e-3
        facts.append(f"times √{format_number(width)}" if is_root else f"times {format_number(embedding.scale)}")
    return Block("embedding", "Embedding", tuple(facts), f"{address}.table")


def _tables(model: spec.Model) -> dict[Path, spec.Table]:
    return {path: node for path, node in spec.walk(model) if isinstance(node, spec.Table)}


def position_block(position: spec.Sinusoidal | spec.Learned | spec.Part, width: int, address: Path) -> Block:
    """Return the box of the position embedding."""
    if isinstance(position, spec.Part):
        return part_block("position", position, address)
    if isinstance(position, spec.Sinusoidal):
        return Block("position", "sinusoidal", ("positions",), address)
    return Block("position", "Positions", (f"{format_number(position.rows)} × {format_number(width)}",), address)


def score_table_block(table: spec.RelativeBuckets | spec.DistanceTable, width: int, address: Path) -> Block:
    """Return the box of the relative-position table that the attentions of a stack share."""
    if isinstance(table, spec.RelativeBuckets):
        return Block("position", "Position buckets", (f"{table.count} × {table.num_heads} heads",), address)
    facts, norms = [f"{format_number(2 * table.span)} × {format_number(width)}"], []
    if table.buckets is not None:
        facts.append(f"{format_number(table.buckets)} buckets")
    if table.norm is not None:
        facts.append(_norm_name(table.norm))
        norms.append(f"{address}.norm")
    return Block("position", "Distances", tuple(facts), address, tuple(norms))


def linear_block(inputs: int, outputs: int, address: Path, *extra: str) -> Block:
    """Return the box of a linear layer."""
    return Block("linear", "Linear", (format_sizes(inputs, outputs), *extra), address)


def head_blocks(model: spec.Model, width: int, tokens: str) -> Iterator[tuple[Block, str]]:
    """Yield the boxes of a head with the size of each output: "tokens × 768", or "768" for a whole text.

    Args:
        model: spec of the model, with or without a head.
        width: width of the hidden states.
        tokens: name of the token axis.
    """
    is_pooled = False
    for index, layer in enumerate(() if model.head is None else model.head.layers):
        address = f"head.layers.{index}"
        match layer:
            case spec.Linear():
                tied = () if layer.weight is None else (_tie(model, layer.weight),)
                scale = () if layer.scale == 1.0 else (f"input × {format_number(layer.scale)}",)
                block = linear_block(width, layer.size, address, *tied, *scale)
                width = layer.size
            case spec.Activation():
                block = Block("linear", _ACTIVATIONS[layer.function], (), address)
            case spec.LayerNorm() | spec.RMSNorm():
                block = norm_block(layer, address)
            case spec.Pool():
                block, is_pooled = (
                    Block("linear", "Pooling", tuple(_POOLS[mode] for mode in layer.modes), address),
                    True,
                )
                width *= len(layer.modes)
            case spec.SoftCap():
                block = Block("linear", "Soft cap", (format_number(layer.value),), address)
            case spec.L2Normalize():
                block = Block("linear", "Scaled to length 1", (), address)
        yield block, format_number(width) if is_pooled else f"{tokens} × {format_number(width)}"


def _tie(model: spec.Model, weight: spec.Reference) -> str:
    owner = "embedding" if len(_tables(model)) == 1 else f"{weight.path.split('.')[0]}'s table"
    return f"tied to the {owner}"


def output_name(head: spec.Head | None) -> str:
    """Return the name of a model's output, such as "logits"."""
    if head is None:
        return "hidden states"
    return "logits" if isinstance(head.layers[-1], spec.Linear | spec.SoftCap) else "vector of the text"
