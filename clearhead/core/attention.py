"""Multi-head attention. Legend: B batch, T queries, D width, H heads, E head size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead import spec
from clearhead.base.hooks import HookPoints, is_seen
from clearhead.core.context import Context
from clearhead.core.kernels.attention import Kernel, choose_kernel, eager_is_better, fused_attention
from clearhead.core.kernels.dropout import Dropout
from clearhead.core.kernels.positions import rotary_angles, rotate
from clearhead.core.norm import build_norm
from clearhead.core.rare.rope_scaling import total_lengths
from clearhead.core.shapes import Keys, MayAttend, Queries, Scores, States

Heads = Float[Tensor, "batch any_heads tokens head_size"]


def attention_weights(scores: Scores, mask: MayAttend | None, sink: Float[Tensor, " heads"] | None = None) -> Scores:
    """Return weights that sum to one over the keys that the mask allows; a query with none gets zeros.

    Args:
        scores: -inf where the mask is False.
        sink: one more score for each head; its weight is left out, so that the others sum to less than one.

    Source: arXiv 1706.03762, eq. 1; the sink: arXiv 2309.17453, section 3.2.
    """
    if sink is not None:
        column = sink.to(scores.dtype)[:, None, None].expand(len(scores), -1, scores.shape[2], 1)
        return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    weights = scores.softmax(dim=-1)
    if mask is None:
        return weights
    empty = ~mask.any(dim=-1, keepdim=True)
    # Asking first saves a pass on a CPU; a compiled step would be cut in two by the question.
    is_needed = torch.compiler.is_compiling() or bool(empty.any())
    return weights.masked_fill(empty, 0.0) if is_needed else weights


def repeat_heads(x: Keys, num_heads: int) -> Float[Tensor, "batch heads keys head_size"]:
    """Repeat each key/value head for the query heads that share it. Source: arXiv 2305.13245, section 2.2."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


@spec.builds(spec.Attention)
class Attention(HookPoints):
    """out(softmax(query key^T * scale + bias) value), for each head. Source: arXiv 1706.03762, section 3.2.

    Keys and values are projected from vectors of the source width, which is that of the stream where it is None.
    """

    points: tuple[str, ...] = ("queries", "keys", "values", "scores", "weights", "mixed")
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(rotate)

    def __init__(self, width: int, attention: spec.Attention, source_width: int | None = None) -> None:
        super().__init__()
        self.spec = attention
        size, bias, source_width = attention.head_size, attention.bias, source_width or width
        self.query: nn.Linear = nn.Linear(width, attention.num_heads * size, bias=bias.query)
        self.key: nn.Linear = nn.Linear(source_width, attention.num_kv_heads * size, bias=bias.key)
        self.value: nn.Linear = nn.Linear(source_width, attention.num_kv_heads * size, bias=bias.value)
        self.out: nn.Linear = nn.Linear(attention.num_heads * size, width, bias=bias.out)
        self.query_norm: nn.Module = _build_query_key_norm(attention, attention.num_heads)
        self.key_norm: nn.Module = _build_query_key_norm(attention, attention.num_kv_heads)
        self.sink: nn.Parameter | None = nn.Parameter(torch.zeros(attention.num_heads)) if attention.sink else None
        self.score_step: nn.Module | None = spec.module_of(attention.score_step, attention.num_heads)
        self.weight_step: nn.Module | None = spec.module_of(attention.weight_step, attention.num_heads)
        self.dropout: Dropout = Dropout(attention.dropout)
        self.scale: float = size**-0.5 if attention.scale is None else attention.scale
        self.mask_key: str = attention.model_dump_json(include={"mask"})  # text: a compiled step cannot hash a spec
        self.rotation_key: str = attention.model_dump_json(include={"position", "head_size"})

    def forward(self, x_BTD: States, context: Context) -> States:
        query, key, value = map(self.split, self.project(x_BTD, self.query, self.key, self.value))
        query, key = self.prepare(query, key, context)
        query, key, value = self.point("queries", query), self.point("keys", key), self.point("values", value)
        if context.cache is not None:
            key, value = context.cache.self_attention[self, context.depth].append(key, value)
        return self.merge(self.mix(query, key, value, self.bias(query, key, context), context))

    def project(self, x_BTD: States, *layers: nn.Module) -> tuple[Tensor, ...]:
        return tuple(layer(x_BTD) for layer in layers)

    def split(self, projected: Float[Tensor, "batch tokens inner"]) -> Heads:
        if self.spec.clip is not None:
            projected = projected.clamp(-self.spec.clip, self.spec.clip)
        return projected.unflatten(-1, (-1, self.spec.head_size)).transpose(1, 2)

    def merge(self, mixed: Queries) -> States:
        return self.out(self.point("mixed", mixed).transpose(1, 2).flatten(2))

    def prepare(self, query: Queries, key: Keys, context: Context) -> tuple[Tensor, Tensor]:
        """Norm and rotate queries and keys, in the order of the spec."""
        is_late = (norm := self.spec.query_key_norm) is not None and norm.after_rotation
        if not is_late:
            query, key = self.normed(self.query_norm, query), self.normed(self.key_norm, key)
        if (rotary := self.spec.position) is not None:
            cos, sin = context.once(self.rotation_key, lambda: self.angles(rotary, context))
            query, key = self.rotate(query, cos, sin), self.rotate(key, cos, sin)
        if is_late:
            query, key = self.normed(self.query_norm, query), self.normed(self.key_norm, key)
        return query, key

    def normed(self, norm: nn.Module, x_BHTE: Heads) -> Heads:
        choice, x_BTHE = self.spec.query_key_norm, x_BHTE.transpose(1, 2)
        if choice is None or choice.over == "head":
            return norm(x_BTHE).transpose(1, 2)
        return norm(x_BTHE.flatten(2)).unflatten(2, x_BTHE.shape[2:]).transpose(1, 2)

    def angles(self, rotary: spec.Rotary, context: Context) -> tuple[Tensor, Tensor]:
        return rotary_angles(context.query_position, rotary, self.spec.head_size, total_lengths(rotary, context))

    def bias(self, query: Queries, key: Keys, context: Context) -> Scores | None:
        """Return the bias on the scores; None in this class."""

    def mask(self, context: Context) -> MayAttend | None:
        return context.once(self.mask_key, lambda: context.masking.build(self.spec.mask, context.query_position.device))

    def mix(self, query: Queries, key: Keys, value: Keys, bias: Scores | None, context: Context) -> Queries:
        """Mix the values by the eager or the fused kernel; both give the same result."""
        if eager_is_better(query, key, bias) or self.kernel()[0] == "eager":
            return self.weigh(self.weights(query, key, bias, context), value)
        if bias is None and context.masking.is_only_causal(self.spec.mask):
            return fused_attention(query, key, value, None, scale=self.scale, is_causal=True)
        return fused_attention(query, key, value, self.mask(context), bias, scale=self.scale)

    def scores(self, query: Queries, key: Keys, bias: Scores | None, context: Context) -> Scores:
        """Return query key^T * scale, capped and biased as the spec says; -inf where the mask is False."""
        mask = self.mask(context)
        scores = query @ repeat_heads(key, query.shape[1]).transpose(-1, -2) * self.scale
        if self.spec.soft_cap is not None:
            scores = self.spec.soft_cap * torch.tanh(scores / self.spec.soft_cap)
        scores = scores if bias is None else scores + bias
        scores = scores if self.score_step is None else self.score_step(scores, context)
        return scores if mask is None else scores.masked_fill(~mask, float("-inf"))

    def weights(self, query: Queries, key: Keys, bias: Scores | None, context: Context) -> Scores:
        """Return the weights of the eager kernel, before dropout."""
        scores = self.point_by_row("scores", self.scores(query, key, bias, context), context)
        return self.point_by_row("weights", self.normalize(scores, context), context)

    def normalize(self, scores: Scores, context: Context) -> Scores:
        """Turn scores into weights: by the softmax, or by a step that sees no query without a key."""
        mask = self.mask(context)
        if self.weight_step is None:
            return attention_weights(scores, mask, self.sink)
        if mask is None:
            return self.weight_step(scores, context)
        return self.weight_step(scores.masked_fill(~mask.any(-1, True), 0.0), context).masked_fill(~mask, 0.0)

    def weigh(self, weights: Scores, value: Keys) -> Queries:
        """Sum the values by their weights."""
        return self.dropout(weights).to(value.dtype) @ repeat_heads(value, weights.shape[1])  # a bias is float32

    def point_by_row(self, name: str, x: Scores, context: Context) -> Scores:
        return self.point(name, x)

    def kernel(self) -> Kernel:
        """Return the kernel of the current mode for all but short sequences, and the reason."""
        is_watched = self.is_watched("scores", "weights") or is_seen(self.dropout)
        return choose_kernel(self.spec, self.dropout.p, self.training, is_watched)


class MemoryAttention(Attention):
    """Attention over the memory: its keys are made once per sentence, for whose rows (beams) they are never copied."""

    def forward(self, x_BTD: States, context: Context) -> States:
        query = self.point("queries", self.normed(self.query_norm, self.split(self.query(x_BTD))))
        key, value = self.remembered(context)
        mixed = self.mix(_fold(query, len(query) // len(key)), key, value, None, context)
        return self.merge(_unfold(mixed, context.masking.num_queries))

    def remembered(self, context: Context) -> tuple[Keys, Keys]:
        place, kept = (self, context.depth), {} if context.cache is None else context.cache.memory_attention
        if place not in kept:
            assert context.memory is not None
            key, value = map(self.split, self.project(context.memory, self.key, self.value))
            kept[place] = self.point("keys", self.normed(self.key_norm, key)), self.point("values", value)
        return kept[place]

    def mask(self, context: Context) -> MayAttend | None:
        return None if context.memory_mask is None else context.memory_mask[:, None, None, :]

    def point_by_row(self, name: str, x: Scores, context: Context) -> Scores:
        if not self.is_watched(name):
            return x
        seen = self.point(name, _unfold(x, context.masking.num_queries))
        return _fold(seen, len(seen) // len(x))


def _fold(x: Tensor, rows: int) -> Float[Tensor, "sentences heads queries_of_rows any_size"]:
    return x.unflatten(0, (-1, rows)).transpose(1, 2).flatten(2, 3)


def _unfold(x: Tensor, num_queries: int) -> Float[Tensor, "batch heads queries any_size"]:
    return x.unflatten(2, (-1, num_queries)).transpose(1, 2).flatten(0, 1)


def _build_query_key_norm(attention: spec.Attention, num_heads: int) -> nn.Module:
    choice, size = attention.query_key_norm, attention.head_size
    if choice is None:
        return build_norm(size, None)
    over_head = (num_heads, size) if choice.per_head else size
    return build_norm(num_heads * size if choice.over == "width" else over_head, choice.norm)
