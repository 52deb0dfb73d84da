"""Multi-head attention: one answer, two bodies.

Legend: B batch, M sentences of the memory, T queries, S keys, D width, H heads, K key/value heads, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.core.cache import Cache, KeyValues
from clearhead.core.initialize import initialize
from clearhead.core.mask import AnyMask, AttentionMask, Visibility
from clearhead.core.norm import build_norm
from clearhead.core.position import RelativeBuckets, alibi_bias, rotary_angles, rotate
from clearhead.core.rare.disentangled import Disentangled, DistanceTable
from clearhead.errors import InputError
from clearhead.kernels.dropout import Dropout

# Up to here a batch of small matrix products beats the fused kernel of a CPU, forward and backward.
SHORT_ON_CPU = 64


class Tap(nn.Identity):
    """A named place: a forward hook here sees an activation and may replace it."""

    @property
    def is_watched(self) -> bool:
        return bool(self._forward_hooks or self._forward_pre_hooks)


@dataclass
class Context:
    """What all attentions of one call of a stack share; derived tensors are made once, at first need."""

    visibility: Visibility
    query_position: Int[Tensor, "batch queries"]
    key_position: Int[Tensor, "batch keys"]
    memory: Float[Tensor, "sentences memory_keys memory_width"] | None = None
    memory_mask: Bool[Tensor, "sentences memory_keys"] | None = None
    cache: Cache | None = None
    length: Int[Tensor, "rows queries"] | None = None  # of the sequence each query belongs to, where that matters
    depth: int = 0  # how many layers ran before: what one module keeps for each depth it runs at
    made: dict[object, Tensor | None] = field(default_factory=dict)

    def mask(self, mask: AnyMask) -> AttentionMask | None:
        key = (mask.kind, mask.before, mask.after) if isinstance(mask, spec.Window) else mask.kind
        if key not in self.made:
            self.made[key] = self.visibility.resolve(mask, self.query_position.device)
        return self.made[key]

    def rotation(self, rotary: spec.Rotary, head_size: int, key: str) -> tuple[Tensor, Tensor]:
        if key not in self.made:
            self.made[key] = torch.stack(rotary_angles(self.query_position, rotary, head_size, self.length))
        cos, sin = self.made[key].unbind()  # type: ignore[union-attr]
        return cos, sin

    def alibi(self, alibi: spec.Alibi, num_heads: int) -> Tensor:
        key = ("alibi", num_heads, alibi.rounding, alibi.slopes)
        if key not in self.made:
            self.made[key] = alibi_bias(self.query_position, self.key_position, *key[1:])
        return self.made[key]  # type: ignore[return-value]

    def read(self, table: RelativeBuckets | DistanceTable) -> Tensor:
        if table not in self.made:
            self.made[table] = table(self.query_position, self.key_position)
        return self.made[table]  # type: ignore[return-value]


def attention_weights(
    scores: Float[Tensor, "batch heads queries keys"],
    allowed: AttentionMask | None,
    sink: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "batch heads queries keys"]:
    """Turn scores into weights that sum to one over the allowed keys; a query with none gets zeros.

    A sink is one more score for each head: its weight is left out, so that the others sum to less than one.

    Source: arXiv 1706.03762, eq. 1; the sink: arXiv 2309.17453, section 3.2.
    """
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    if sink is not None:
        column = sink.to(scores.dtype)[:, None, None].expand(len(scores), -1, scores.shape[2], 1)
        return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    weights = scores.softmax(dim=-1)
    if allowed is None:
        return weights
    empty = ~allowed.any(dim=-1, keepdim=True)
    # Asking first saves a pass on a CPU; a compiled step would be cut in two by the question.
    is_needed = torch.compiler.is_compiling() or bool(empty.any())
    return weights.masked_fill(empty, 0.0) if is_needed else weights


class Attention(nn.Module):
    """out(softmax(query key^T * scale + bias) value), for each head. Source: arXiv 1706.03762, section 3.2.

    Args:
        width: of the stream that asks.
        attention: heads, projections, mask and positions.
        memory_width: of what is attended to where the source is the memory; None: as the stream.
    """

    def __init__(self, width: int, attention: spec.Attention, memory_width: int | None = None) -> None:
        super().__init__()
        self.spec = attention
        size, bias = attention.head_size, attention.bias
        source_width = width if memory_width is None or attention.source == "self" else memory_width
        self.query = nn.Linear(width, attention.num_heads * size, bias=bias.query)
        self.key = nn.Linear(source_width, attention.num_kv_heads * size, bias=bias.key)
        self.value = nn.Linear(source_width, attention.num_kv_heads * size, bias=bias.value)
        self.out = nn.Linear(attention.num_heads * size, width, bias=bias.out)
        self.query_norm = _build_query_key_norm(attention, attention.num_heads)
        self.key_norm = _build_query_key_norm(attention, attention.num_kv_heads)
        self.norms_late = attention.query_key_norm is not None and attention.query_key_norm.after_rotation
        # A string, for a compiled step cannot hash a node of the spec.
        self.rotation_key = f"{attention.position} of {attention.head_size}"
        self.sink = nn.Parameter(torch.zeros(attention.num_heads)) if attention.sink else None
        self.dropout = Dropout(attention.dropout)
        self.scale = size**-0.5 if attention.scale is None else attention.scale
        self.score_bias = _build_score_bias(width, attention)
        self.borrowed: tuple[RelativeBuckets, ...] = ()  # in a tuple, so that the table is not registered twice
        self.scores, self.weights = Tap(), Tap()

    def forward(
        self, x_BTD: Float[Tensor, "batch queries width"], context: Context
    ) -> Float[Tensor, "batch queries width"]:
        query = self._heads(self.query, x_BTD, self.query_norm)
        if self.spec.source == "memory":
            return self._attend_to_memory(query, context)
        key, value = self._heads(self.key, x_BTD, self.key_norm), self._heads(self.value, x_BTD)
        if self.spec.position is not None:
            cos, sin = context.rotation(self.spec.position, self.spec.head_size, self.rotation_key)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if self.norms_late:
            query, key = _by_head(self.query_norm, query), _by_head(self.key_norm, key)
        if context.cache is not None:
            key, value = context.cache.self_attention.setdefault((self, context.depth), KeyValues()).append(key, value)
        bias = self._bias_of(context, query, key)
        causal = bias is None and context.visibility.is_purely_causal(self.spec.mask)
        if causal and self._body(query, key, None) == "fused":
            mixed = self._fused(query, key, value, None, causal=True)
        else:
            mixed = self.attend(query, key, value, context.mask(self.spec.mask), bias)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _attend_to_memory(
        self, query: Float[Tensor, "batch heads queries head_size"], context: Context
    ) -> Float[Tensor, "batch queries width"]:
        place = (self, context.depth)
        kept = context.cache.memory_attention.get(place) if context.cache is not None else None
        if kept is None:
            assert context.memory is not None
            key = self._heads(self.key, context.memory, self.key_norm)
            value = self._heads(self.value, context.memory)
            if context.cache is not None:
                context.cache.memory_attention[place] = (key, value)
        else:
            key, value = kept
        # The rows (beams) of one sentence become queries of one row, so that its memory is read once and never copied.
        rows, heads, length, size = query.shape
        beams = rows // key.shape[0]
        query = query.unflatten(0, (-1, beams)).transpose(1, 2).reshape(-1, heads, beams * length, size)
        allowed = None if context.memory_mask is None else context.memory_mask[:, None, None, :]
        mixed = self.attend(query, key, value, allowed, None)
        mixed = mixed.unflatten(2, (beams, length)).transpose(1, 2).reshape(rows, heads, length, size)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def attend(
        self,
        query: Float[Tensor, "batch heads queries head_size"],
        key: Float[Tensor, "batch kv_heads keys head_size"],
        value: Float[Tensor, "batch kv_heads keys head_size"],
        allowed: AttentionMask | None,
        bias: Float[Tensor, "#batch heads queries keys"] | None,
    ) -> Float[Tensor, "batch heads queries head_size"]:
        """Mix the values by the body that `body` names; both give the same answer."""
        if self._body(query, key, bias) == "fused":
            if bias is not None:
                bias = bias.to(query.dtype)  # the kernel does not check, and reads one type as the other
                allowed = bias if allowed is None else bias.masked_fill(~allowed, float("-inf"))
            return self._fused(query, key, value, allowed)
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        scores = query @ key.transpose(-1, -2) * self.scale
        if self.spec.soft_cap is not None:
            scores = self.spec.soft_cap * torch.tanh(scores / self.spec.soft_cap)
        if bias is not None:
            scores = scores + bias
        weights = self.weights(attention_weights(self.scores(scores), allowed, self.sink))
        return self.dropout(weights).to(value.dtype) @ value  # a bias on the scores is float32

    def _fused(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool = False
    ) -> Float[Tensor, "batch heads queries head_size"]:
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=self.scale, enable_gqa=query.shape[1] != key.shape[1]
        )

    def _body(self, query: Tensor, key: Tensor, bias: Tensor | None) -> Literal["explicit", "fused"]:
        longest = max(query.shape[2], key.shape[2])
        short = query.device.type == "cpu" and longest <= SHORT_ON_CPU and query.shape[2] > 1
        return "explicit" if short or (bias is not None and bias.requires_grad) else self.body()[0]

    def body(self) -> tuple[Literal["explicit", "fused"], str]:
        """Name the body that runs in the present mode for all but short sequences, and say why."""
        if self.scores.is_watched or self.weights.is_watched:
            return "explicit", "scores or weights are being watched"
        if self.spec.soft_cap is not None or self.spec.sink:
            return "explicit", f"the fused kernel has no {'sink' if self.spec.sink else 'soft cap'}"
        if self.training and self.dropout.p > 0.0:
            return "explicit", "the fused kernel has no attention dropout on a CPU"
        if self.training and isinstance(
            self.spec.score_bias, spec.RelativeBuckets | spec.Reference | spec.TableHeads | spec.Disentangled
        ):
            return "explicit", "the fused kernel has no trainable score bias on a CPU"
        return "fused", f"nothing needs the weights; up to {SHORT_ON_CPU} tokens a CPU is faster with the explicit one"

    def _heads(
        self, projection: nn.Module, x_BTD: Tensor, norm: nn.Module | None = None
    ) -> Float[Tensor, "batch any_heads tokens head_size"]:
        projected = projection(x_BTD)
        if self.spec.clip is not None:
            projected = projected.clamp(-self.spec.clip, self.spec.clip)
        choice = self.spec.query_key_norm
        if norm is not None and choice is not None and choice.over == "width":
            projected = norm(projected)
        x_BTHE = projected.unflatten(-1, (-1, self.spec.head_size))
        if norm is not None and choice is not None and choice.over == "head" and not self.norms_late:
            x_BTHE = norm(x_BTHE)
        return x_BTHE.transpose(1, 2)

    def _bias_of(self, context: Context, query: Tensor, key: Tensor) -> Tensor | None:
        kind = self.spec.score_bias
        if isinstance(kind, spec.Alibi):
            bias = context.alibi(kind, self.spec.num_heads)
            return bias * self.scale if kind.scaled else bias
        if isinstance(self.score_bias, Disentangled):
            rows = context.read(self.score_bias.borrowed[0])
            return self.score_bias(query, key, rows, (self.query, self.key, self._heads)) * self.scale
        table = self.borrowed[0] if self.borrowed else self.score_bias
        scores = None if table is None else context.read(table)
        return scores if scores is None or not isinstance(kind, spec.TableHeads) else scores[:, list(kind.heads)]


def _build_score_bias(width: int, attention: spec.Attention) -> RelativeBuckets | Disentangled | None:
    match attention.score_bias:
        case spec.RelativeBuckets() as buckets:
            return RelativeBuckets(buckets)
        case spec.Disentangled() as scores:
            return Disentangled(width, attention, scores)
        case _:  # nothing, something without weights, or a table that another module owns
            return None


def _build_query_key_norm(attention: spec.Attention, num_heads: int) -> nn.Module:
    choice, size = attention.query_key_norm, attention.head_size
    if choice is None:
        return build_norm(size, None)
    if choice.over == "width":
        return build_norm(num_heads * size, choice.norm)
    return build_norm((num_heads, size) if choice.per_head else size, choice.norm)


def _by_head(norm: nn.Module, x_BHTE: Tensor) -> Float[Tensor, "batch any_heads tokens head_size"]:
    normed: Tensor = norm(x_BHTE.transpose(1, 2))  # a weight for each head stands on the axes (head, size)
    return normed.transpose(1, 2)


class MultiHeadAttention(Attention):
    """Multi-head attention by itself, to use outside of a model.

    Args:
        width: of queries and memory.
        num_heads: of the queries.
        num_kv_heads: of keys and values; None: as many as of the queries.
        head_size: None: width / num_heads.
        bias: whether the four projections have one.
        dropout: probability of dropping a weight, in training.
        mask: the structure that is always there; padding comes with the call.
        position: rotation of query and key, or a bias on the scores.

    Raises:
        InputError: sizes that do not fit together.

    Source: arXiv 1706.03762, section 3.2.2.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        mask: AnyMask = spec.Full(),
        position: spec.Rotary | spec.Alibi | spec.RelativeBuckets | None = None,
    ) -> None:
        if head_size is None:
            if num_heads < 1 or width % num_heads:
                raise InputError(f"width must be a multiple of num_heads; got width {width} and {num_heads} heads")
            head_size = width // num_heads
        attention = spec.Attention(
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_size=head_size,
            mask=mask,
            position=position if isinstance(position, spec.Rotary) else None,
            score_bias=None if isinstance(position, spec.Rotary) else position,
            bias=spec.Biases(query=bias, key=bias, value=bias, out=bias),
            dropout=dropout,
        )
        spec.validate(attention)
        super().__init__(width, attention)
        initialize(self, spec.Xavier())

    @overload  # type: ignore[override]
    def forward(
        self,
        query: Tensor,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        return_weights: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        query: Tensor,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        return_weights: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        query: Float[Tensor, "batch queries width"],
        memory: Float[Tensor, "batch keys width"] | None = None,
        mask: Bool[Tensor, "#batch keys"] | Bool[Tensor, "#batch queries keys"] | AttentionMask | None = None,
        return_weights: bool = False,
    ) -> Float[Tensor, "batch queries width"] | tuple[Tensor, Tensor]:
        """Attend from query to memory, or to query itself.

        Args:
            query: [batch, queries, width].
            memory: [batch, keys, width]; None: the query.
            mask: True = may attend; [batch, keys] hides padding, [batch, queries, keys] or
                [batch, heads, queries, keys] says all. It is joined with the mask of the construction.
            return_weights: also return the weights [batch, heads, queries, keys], before dropout.

        Raises:
            InputError: a mask that is not boolean: True must mean "may attend", and numbers leave that open.
        """
        if mask is not None and mask.dtype != torch.bool:
            raise InputError(f"mask must be boolean, True = may attend; got {mask.dtype}")
        source = query if memory is None else memory
        heads = self._heads(self.query, query, self.query_norm)
        key, value = self._heads(self.key, source, self.key_norm), self._heads(self.value, source)
        if mask is not None and mask.dim() < 4:
            mask = mask[:, None, None, :] if mask.dim() == 2 else mask[:, None]
        context = _standalone_context(query.shape[1], source.shape[1], mask, query.device)
        if self.spec.position is not None:
            length = context.key_position.new_full((1, 1), source.shape[1])
            heads, key = (
                rotate(x, *rotary_angles(position, self.spec.position, self.spec.head_size, length))
                for x, position in ((heads, context.query_position), (key, context.key_position))
            )
        seen: list[Tensor] = []
        # A watched tap selects the explicit body, the one that has weights to show.
        handle = self.weights.register_forward_hook(lambda *call: seen.append(call[2])) if return_weights else None
        try:
            mixed = self.attend(heads, key, value, context.mask(self.spec.mask), self._bias_of(context, heads, key))
        finally:
            if handle is not None:
                handle.remove()
        out = self.out(mixed.transpose(1, 2).flatten(2))
        return (out, seen[0]) if return_weights else out


def _standalone_context(queries: int, keys: int, allowed: Tensor | None, device: torch.device) -> Context:
    visibility = Visibility(queries, keys, allowed=allowed)
    positions = torch.arange(max(queries, keys), device=device)[None]
    # Where lengths differ, the queries are the last tokens of the keys, as in decoding with a cache.
    first = max(0, keys - queries)
    return Context(visibility, positions[:, first : first + queries], positions[:, :keys])
