"""Consistency checks of single nodes, which need no other node of the spec."""

from __future__ import annotations

from collections.abc import Iterator

from clearhead.spec.base import LayerNorm, Node, RMSNorm
from clearhead.spec.nodes import (
    Attention,
    Causal,
    ClampedGate,
    FeedForward,
    Full,
    MixtureOfExperts,
    QueryKeyNorm,
    Stack,
)
from clearhead.spec.positions import (
    Alibi,
    BandScaling,
    Disentangled,
    DistanceTable,
    DynamicScaling,
    Learned,
    LongRopeScaling,
    RelativeBuckets,
    Rotary,
    Sinusoidal,
    YarnScaling,
)


def node_faults(node: Node, path: str) -> list[str]:
    """Return the inconsistencies inside one node; each message begins with the path of the node."""
    match node:
        case LayerNorm() | RMSNorm():
            faults = _norm_faults(node)
        case Attention():
            faults = _attention_faults(node)
        case BandScaling() | YarnScaling():
            faults = _scaling_faults(node)
        case RelativeBuckets() | DistanceTable():
            faults = _distance_faults(node)
        case Disentangled():
            faults = _disentangled_faults(node)
        case FeedForward():
            faults = _feed_forward_faults(node)
        case MixtureOfExperts():
            faults = _expert_faults(node)
        case Stack():
            faults = _stack_faults(node)
        case _:
            return []
    where = path or type(node).__name__
    return [f"{where}: {fault}" for fault in faults]


def _norm_faults(norm: LayerNorm | RMSNorm) -> Iterator[str]:
    if norm.unit_offset and not norm.weight:
        yield "unit_offset has no effect without a weight; remove it"


def _attention_faults(node: Attention) -> Iterator[str]:
    if node.num_heads % node.num_kv_heads:
        yield f"num_heads {node.num_heads} is not a multiple of num_kv_heads {node.num_kv_heads}"
    if node.position is not None:
        yield from _rotary_faults(node.position, node.head_size)
    if isinstance(node.score_bias, RelativeBuckets) and node.score_bias.num_heads != node.num_heads:
        yield f"score_bias has {node.score_bias.num_heads} heads, but the attention has {node.num_heads}"
    if isinstance(node.score_bias, Alibi) and len(node.score_bias.slopes or range(node.num_heads)) != node.num_heads:
        yield f"score_bias has {len(node.score_bias.slopes or ())} slopes, but the attention has {node.num_heads} heads"
    if isinstance(node.score_bias, Disentangled):
        if node.num_heads != node.num_kv_heads:
            yield f"disentangled scores need as many kv heads as heads, got {node.num_kv_heads} and {node.num_heads}"
        for name in ("position", "query_key_norm", "clip", "soft_cap"):
            if getattr(node, name) is not None:
                yield f"{name} with disentangled scores is not supported (no defined effect on distances); remove it"
    if isinstance(node.score_bias, Alibi) and node.score_bias.rounding != "none" and not isinstance(node.mask, Causal):
        yield f"rounded ALiBi penalties count from the first token and need a causal mask, got {node.mask.kind}"
    if node.source == "memory" and (node.position or node.score_bias or node.mask != Full()):
        yield "attention to the memory needs a full mask and no position or score bias"
    if node.weight_step is not None and node.sink:
        yield "a sink has no effect if weight_step computes the weights; remove one of them"
    if node.query_key_norm is not None:
        yield from _query_key_norm_faults(node.query_key_norm, node)


def _rotary_faults(rotary: Rotary, head_size: int) -> Iterator[str]:
    size = head_size if rotary.size is None else rotary.size
    if size % 2 or size > head_size:
        yield f"rotary size must be even and at most head_size {head_size}, got {size}"
    if isinstance(rotary.scaling, LongRopeScaling):
        for name, factors in (("short", rotary.scaling.short_factor), ("long", rotary.scaling.long_factor)):
            if len(factors) != size // 2:
                yield f"{name}_factor needs a number for each of {size // 2} frequencies, got {len(factors)}"
    if isinstance(rotary.scaling, DynamicScaling) and size == 2:
        yield "dynamic scaling keeps the first frequency, and a rotary size of 2 has no other; use a larger size"


def _query_key_norm_faults(norm: QueryKeyNorm, node: Attention) -> Iterator[str]:
    has_parameters = norm.norm.weight or (isinstance(norm.norm, LayerNorm) and norm.norm.bias)
    if norm.per_head and norm.over == "width":
        yield "query_key_norm.per_head has no effect on a norm over the width, which has weights per head; remove it"
    if norm.per_head and not has_parameters:
        yield "query_key_norm.per_head has no effect on a norm without weight and bias; remove it"
    if norm.after_rotation and node.position is None:
        yield "query_key_norm.after_rotation has no effect without rotary positions; remove it"
    if norm.after_rotation and norm.over == "width":
        yield "query_key_norm over the width runs before the split into heads, so after_rotation is not possible"
    if node.clip is not None:
        yield "clip and query_key_norm cannot be combined, since models differ in their order; remove one of them"


def _scaling_faults(scaling: BandScaling | YarnScaling) -> Iterator[str]:
    if isinstance(scaling, BandScaling) and scaling.low_frequency_factor >= scaling.high_frequency_factor:
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        yield f"low_frequency_factor {low:g} must be below high_frequency_factor {high:g}"
    if isinstance(scaling, YarnScaling) and scaling.beta_slow >= scaling.beta_fast:
        yield f"beta_slow {scaling.beta_slow:g} must be below beta_fast {scaling.beta_fast:g}"


def _distance_faults(node: RelativeBuckets | DistanceTable) -> Iterator[str]:
    if isinstance(node, DistanceTable):
        if (node.buckets is None) != (node.max_distance is None):
            yield "buckets and max_distance must be set together or not at all"
        elif node.buckets is not None and node.max_distance is not None and node.max_distance <= node.buckets // 2 + 1:
            yield f"max_distance {node.max_distance} is too small for {node.buckets} buckets; raise it, or use fewer"
        return
    if node.bidirectional and node.count % 2:
        yield f"bidirectional buckets need an even count, got {node.count}"
    if node.max_distance <= node.count // (4 if node.bidirectional else 2):
        yield f"max_distance {node.max_distance} is too small for {node.count} buckets; raise it, or use fewer"


def _disentangled_faults(node: Disentangled) -> Iterator[str]:
    if len(set(node.terms)) != len(node.terms):
        yield f"each term may occur only once, got {', '.join(node.terms)}"


def _feed_forward_faults(node: FeedForward) -> Iterator[str]:
    if isinstance(node.activation, ClampedGate) and not node.gated:
        yield "a clamped gate needs gated = true"


def _expert_faults(node: MixtureOfExperts) -> Iterator[str]:
    if node.top_k > node.count:
        yield f"top_k {node.top_k} must be at most the number of experts, {node.count}"


def _stack_faults(node: Stack) -> Iterator[str]:
    embedding = node.embedding
    table_width = node.table_width
    position = embedding.position
    if isinstance(position, Sinusoidal) and table_width % 2:
        yield f"sinusoidal positions need an even width, got {table_width}"
    if isinstance(position, Sinusoidal) and position.layout == "fairseq" and table_width < 4:
        yield f"the fairseq layout needs a width of at least 4, got {table_width}"
    if isinstance(position, Learned) and position.rows <= position.offset:
        yield f"positions have {position.rows} rows, which must be more than the offset {position.offset}"
    if table_width != node.width and embedding.projection is None:
        yield f"an embedding of width {table_width} needs a projection to the width {node.width} of the stack"
    if embedding.scale_rounding != "none" and embedding.scale == 1.0:
        yield "embedding.scale_rounding has no effect on a scale of 1; remove it"
    if node.sharing is not None:
        wrong = sorted({index for index in node.sharing if index >= len(node.layers)})
        if wrong:
            yield f"sharing names layer {wrong[0]}, but there are {len(node.layers)} layers"
        unused = sorted(set(range(len(node.layers))) - set(node.sharing))
        if unused:
            yield f"sharing never runs layer {unused[0]}; remove the layer"
        if node.sharing == tuple(range(len(node.layers))):
            yield "sharing has no effect if every layer runs once, in order; remove it"
