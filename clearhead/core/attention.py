"""Attention: out(softmax(query key^T * scale + bias) value) for each head; a function f_b of the equation in `stack`.

Read `Attention.forward`, `attend` and `weights` first. Legend: B batch, T queries, D width, H heads, E head size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead import spec
from clearhead.base.hooks import HookPoints, is_seen
from clearhead.core.context import Context
from clearhead.core.kernels.attention import Kernel, choose_kernel, eager_is_better, fused_attention
from clearhead.core.kernels.positions import rotary_angles, rotate
from clearhead.core.norm import build_norm
from clearhead.core.rare.rope_scaling import total_lengths
from clearhead.core.shapes import Keys, MayAttend, Queries, Scores, States
from clearhead.spec.registry import build_part

Heads = Float[Tensor, "batch any_heads tokens head_size"]


class Attention(HookPoints):
    """Multi-head attention; keys and values read `source_width` features. Source: arXiv 1706.03762, section 3.2."""

    points: tuple[str, ...] = ("queries", "keys", "values", "scores", "weights", "mixed")

    def __init__(self, width: int, attention: spec.Attention, source_width: int | None = None) -> None:
        super().__init__()
        self.spec = attention
        size, bias, source_width = attention.head_size, attention.bias, source_width or width
        step, weigh = attention.score_step, attention.weight_step
        self.query: nn.Linear = nn.Linear(width, attention.num_heads * size, bias=bias.query)
        self.key: nn.Linear = nn.Linear(source_width, attention.num_kv_heads * size, bias=bias.key)
        self.value: nn.Linear = nn.Linear(source_width, attention.num_kv_heads * size, bias=bias.value)
        self.out: nn.Linear = nn.Linear(attention.num_heads * size, width, bias=bias.out)
        self.query_norm: nn.Module = _build_query_key_norm(attention, attention.num_heads)
        self.key_norm: nn.Module = _build_query_key_norm(attention, attention.num_kv_heads)
        self.sink: nn.Parameter | None = nn.Parameter(torch.zeros(attention.num_heads)) if attention.sink else None
        self.score_step: nn.Module | None = None if step is None else build_part(step, attention.num_heads)
        self.weight_step: nn.Module | None = None if weigh is None else build_part(weigh, attention.num_heads)
        self.dropout: nn.Dropout = nn.Dropout(attention.dropout)
        self.scale: float = size**-0.5 if attention.scale is None else attention.scale
        self.mask_number: int = hash(attention.mask)  # equal numbers share a mask; numbers also compile
        self.rotation_number: int = hash((attention.position, size))
        self.eager_reason: str = ""  # reason against the fused kernel on this device; empty: it may run

    def forward(self, x_BTD: States, context: Context) -> States:
        query, key, value = (self.split(layer(x_BTD)) for layer in (self.query, self.key, self.value))
        query, key = self.prepare(query, key, context)
        query, key, value = self.point("queries", query), self.point("keys", key), self.point("values", value)
        if context.cache is not None:
            key, value = context.cache.self_attention[self, context.depth].append(key, value)
        return self.merge(self.attend(query, key, value, context))

    def attend(self, query: Queries, key: Keys, value: Keys, context: Context) -> Queries:
        """Return softmax(query key^T * scale + bias) value, by the fused kernel or step by step (eager)."""
        bias = self.bias(query, key, context)
        if not eager_is_better(query, key, bias) and self.kernel()[0] == "fused":
            is_causal = bias is None and context.masking.is_only_causal(self.spec.mask)
            mask = None if is_causal else self.mask(context)
            return fused_attention(query, key, value, mask, bias, scale=self.scale, is_causal=is_causal)
        weights = self.weights(query, key, bias, context)
        return self.dropout(weights).to(value.dtype) @ repeat_heads(value, weights.shape[1])  # a bias is float32

    def weights(self, query: Queries, key: Keys, bias: Scores | None, context: Context) -> Scores:
        """Return the weights softmax(query key^T * scale + bias), before dropout. Source: arXiv 1706.03762, eq. 1."""
        mask, step = self.mask(context), self.weight_step
        scores = self.point("scores", self.scores(query, key, bias, context))
        if step is None:
            return self.point("weights", attention_weights(scores, mask, self.sink))
        return self.point("weights", weigh_by_step(step, scores, mask, context))

    def scores(self, query: Queries, key: Keys, bias: Scores | None, context: Context) -> Scores:
        """Return the scores query key^T * scale, then the soft cap and the bias; -inf where the mask is False."""
        mask = self.mask(context)
        scores = query @ repeat_heads(key, query.shape[1]).transpose(-1, -2) * self.scale
        if self.spec.soft_cap is not None:
            scores = self.spec.soft_cap * torch.tanh(scores / self.spec.soft_cap)
        scores = scores if bias is None else scores + bias
        scores = scores if self.score_step is None else self.score_step(scores, context)
        return scores if mask is None else scores.masked_fill(~mask, float("-inf"))

    def mask(self, context: Context) -> MayAttend | None:
        """Return the attention mask, which attentions with equal masks share; None means no mask."""
        if self.mask_number not in context.masks:
            context.masks[self.mask_number] = context.masking.build(self.spec.mask, context.query_position.device)
        return context.masks[self.mask_number]

    def bias(self, query: Queries, key: Keys, context: Context) -> Scores | None:
        """Return the bias to add to the scores; None means no bias. Subclasses override it."""

    def split(self, projected: Float[Tensor, "batch tokens inner"]) -> Heads:
        if self.spec.clip is not None:
            projected = projected.clamp(-self.spec.clip, self.spec.clip)
        return projected.unflatten(-1, (-1, self.spec.head_size)).transpose(1, 2)

    def merge(self, mixed: Queries) -> States:
        return self.out(self.point("mixed", mixed).transpose(1, 2).flatten(2))

    def prepare(self, query: Queries, key: Keys, context: Context) -> tuple[Tensor, Tensor]:
        """Return queries and keys after the query-key norm and the rotation (RoPE), in the order of the spec."""
        choice = self.spec.query_key_norm
        is_late = choice is not None and choice.after_rotation
        if not is_late:
            query, key = norm_heads(self.query_norm, query, choice), norm_heads(self.key_norm, key, choice)
        if (rotary := self.spec.position) is not None:
            cos, sin = self.angles(rotary, context)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if is_late:
            query, key = norm_heads(self.query_norm, query, choice), norm_heads(self.key_norm, key, choice)
        return query, key

    def angles(self, rotary: spec.Rotary, context: Context) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rotation (RoPE), which attentions with equal rotations share."""
        if (key := ("angles", self.rotation_number)) not in context.shared:
            lengths = total_lengths(rotary, context)
            context.shared[key] = rotary_angles(context.query_position, rotary, self.spec.head_size, lengths)
        cos, sin = context.shared[key]
        return cos, sin

    def kernel(self) -> Kernel:
        """Return the kernel, "fused" or "eager", for long sequences in the current mode, and the reason."""
        is_watched = self.is_watched("scores", "weights") or is_seen(self.dropout)
        return choose_kernel(self.spec, self.dropout.p, self.training, is_watched, self.eager_reason)


class MemoryAttention(Attention):
    """Cross-attention: the keys and values of a source sentence are computed once and shared by its beams."""

    def forward(self, x_BTD: States, context: Context) -> States:
        query = norm_heads(self.query_norm, self.split(self.query(x_BTD)), self.spec.query_key_norm)
        query, (key, value) = self.point("queries", query), self.memory_keys_values(context)
        beams = len(query) // len(key)
        if beams > 1 and self.is_watched("scores", "weights"):  # captured scores and weights have one row per beam
            key, value = key.repeat_interleave(beams, 0), value.repeat_interleave(beams, 0)
            mask = context.memory_mask
            context = replace(context, memory_mask=None if mask is None else mask.repeat_interleave(beams, 0))
            return self.merge(self.attend(query, key, value, context))
        # The queries of all rows of a sentence are one sequence, so that its keys are not copied.
        mixed = self.attend(query.unflatten(0, (-1, beams)).transpose(1, 2).flatten(2, 3), key, value, context)
        return self.merge(mixed.unflatten(2, (beams, -1)).transpose(1, 2).flatten(0, 1))

    def memory_keys_values(self, context: Context) -> tuple[Keys, Keys]:
        """Return keys and values of the encoder output (memory); they are computed once and then cached."""
        name, cached = (self, context.depth), {} if context.cache is None else context.cache.memory_attention
        if name not in cached:
            assert context.memory is not None
            key, value = self.split(self.key(context.memory)), self.split(self.value(context.memory))
            key = norm_heads(self.key_norm, key, self.spec.query_key_norm)
            cached[name] = self.point("keys", key), self.point("values", value)
        return cached[name]

    def mask(self, context: Context) -> MayAttend | None:
        return None if context.memory_mask is None else context.memory_mask[:, None, None, :]


def attention_weights(scores: Scores, mask: MayAttend | None, sink: Float[Tensor, " heads"] | None = None) -> Scores:
    """Return attention weights that sum to one over the allowed keys; a query without an allowed key gets zeros.

    Args:
        scores, mask: scores, which are -inf where the mask is False; mask None means no mask.
        sink: one more score per head; its weight is left out, so the others sum to less than one. None means no sink.

    Source: arXiv 1706.03762, eq. 1; the sink: arXiv 2309.17453, section 3.2.
    """
    if sink is not None:
        column = sink.to(scores.dtype)[:, None, None].expand(len(scores), -1, scores.shape[2], 1)
        return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    weights = scores.softmax(dim=-1)
    if mask is None:
        return weights
    empty = ~mask.any(dim=-1, keepdim=True)
    # Skip the fill if no row is empty. Not under torch.compile, nor on a GPU: the test breaks the graph, or waits.
    is_needed = torch.compiler.is_compiling() or weights.device.type != "cpu" or bool(empty.any())
    return weights.masked_fill(empty, 0.0) if is_needed else weights


def weigh_by_step(step: nn.Module, scores: Scores, mask: MayAttend | None, context: Context) -> Scores:
    """Return the weights that a custom module makes from scores; a query without keys gets scores 0 and weights 0."""
    if mask is None:
        return step(scores, context)
    return step(scores.masked_fill(~mask.any(-1, True), 0.0), context).masked_fill(~mask, 0.0)


def repeat_heads(x: Keys, num_heads: int) -> Float[Tensor, "batch heads keys head_size"]:
    """Repeat each key/value head for the query heads that share it. Source: arXiv 2305.13245, section 2.2."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def norm_heads(norm: nn.Module, x_BHTE: Heads, choice: spec.QueryKeyNorm | None) -> Heads:
    """Normalize queries or keys over each head, or over all heads of a token together."""
    x_BTHE = x_BHTE.transpose(1, 2)
    if choice is None or choice.over == "head":
        return norm(x_BTHE).transpose(1, 2)
    return norm(x_BTHE.flatten(2)).unflatten(2, x_BTHE.shape[2:]).transpose(1, 2)


def _build_query_key_norm(attention: spec.Attention, num_heads: int) -> nn.Module:
    choice, size = attention.query_key_norm, attention.head_size
    if choice is None:
        return build_norm(size, None)
    over_head = (num_heads, size) if choice.per_head else size
    return build_norm(num_heads * size if choice.over == "width" else over_head, choice.norm)
