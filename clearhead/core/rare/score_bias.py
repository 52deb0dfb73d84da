"""Scores with a bias by distance: ALiBi, and trained tables of buckets.

Legend: B batch, T queries, S keys, H heads.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.core.attention import Attention, Bias, Keys, Queries
from clearhead.core.context import Context
from clearhead.core.rare.disentangled import DistanceTable


def alibi_slopes(num_heads: int) -> Float[Tensor, " {num_heads}"]:
    """Return the default slope of each head: a geometric sequence, filled up from the next finer one.

    Source: arXiv 2108.12409, section 3, and its reference code for head counts that are no power of two.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * head / power) for head in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * head / power) for head in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(slopes)


def alibi_bias(
    query_position: Int[Tensor, "batch queries"],
    key_position: Int[Tensor, "batch keys"],
    num_heads: int,
    rounding: Literal["none", "bfloat16"] = "none",
    slopes: tuple[float, ...] | None = None,
) -> Float[Tensor, "batch {num_heads} queries keys"]:
    """Return minus slope times distance; in a bidirectional stack the distance counts both ways.

    Rounded, it is slope times the key's position, which in a softmax is the same but for the rounding; slope, position
    and product are rounded, since the models that do so were trained with it.
    """
    slope = (alibi_slopes(num_heads) if slopes is None else torch.tensor(slopes)).to(key_position.device)
    if rounding == "bfloat16":
        bias = (slope.bfloat16()[:, None] * key_position[:, None, :].bfloat16()).float()
        return bias[:, :, None].expand(-1, -1, query_position.shape[1], -1)
    distance = (query_position[:, None, :, None] - key_position[:, None, None, :]).abs().float()
    return -distance * slope[:, None, None]


def relative_bucket(
    relative: Int[Tensor, "*axes"], count: int, max_distance: int, bidirectional: bool
) -> Int[Tensor, "*axes"]:
    """Number the bucket of key position minus query position: exact when near, logarithmic when far.

    Source: arXiv 1910.10683, section 2.1; the numbering is that of its released code.
    """
    start = torch.zeros_like(relative)
    if bidirectional:
        count //= 2
        start = (relative > 0) * count
        distance = relative.abs()
    else:
        distance = (-relative).clamp(min=0)
    exact = count // 2
    # The maximum keeps the logarithm finite where the exact branch is taken.
    ratio = distance.clamp(min=exact).float() / exact
    far = exact + (ratio.log() / math.log(max_distance / exact) * (count - exact)).long()
    return start + torch.where(distance < exact, distance, far.clamp(max=count - 1))


class RelativeBuckets(nn.Module):
    """A trained score bias [buckets, heads], read by the bucket of the distance between key and query."""

    def __init__(self, buckets: spec.RelativeBuckets) -> None:
        super().__init__()
        self.buckets = buckets
        self.weight = nn.Parameter(torch.empty(buckets.count, buckets.num_heads))

    def forward(
        self, query_position: Int[Tensor, "batch queries"], key_position: Int[Tensor, "batch keys"]
    ) -> Float[Tensor, "batch heads queries keys"]:
        relative = key_position[:, None, :] - query_position[:, :, None]
        buckets = self.buckets
        bucket_BTS = relative_bucket(relative, buckets.count, buckets.max_distance, buckets.bidirectional)
        return F.embedding(bucket_BTS, self.weight).permute(0, 3, 1, 2)


class BiasedAttention(Attention):
    """Attention with ALiBi, or with a table of buckets: its own, or one that it borrows, all heads of it or some."""

    def __init__(self, width: int, attention: spec.Attention) -> None:
        super().__init__(width, attention)
        kind = attention.score_bias
        self.score_bias = RelativeBuckets(kind) if isinstance(kind, spec.RelativeBuckets) else None
        self.borrowed: tuple[RelativeBuckets, ...] = ()  # in a tuple, so that the table is not registered twice

    def bias(self, query: Queries, key: Keys, context: Context) -> Bias | None:
        kind, positions = self.spec.score_bias, (context.query_position, context.key_position)
        if isinstance(kind, spec.Alibi):
            heads, rounding, slopes = self.spec.num_heads, kind.rounding, kind.slopes
            place = ("alibi", heads, rounding, slopes)
            bias = context.once(place, lambda: alibi_bias(*positions, heads, rounding, slopes))
            return bias * self.scale if kind.scaled else bias
        table = self.score_bias or self.borrowed[0]
        bias = context.once(table, lambda: table(*positions))
        return bias[:, list(kind.heads)] if isinstance(kind, spec.TableHeads) else bias


def build_score_table(width: int, table: spec.RelativeBuckets | spec.DistanceTable | None) -> nn.Module | None:
    """Build the table that the attentions of a stack borrow, or None."""
    if isinstance(table, spec.DistanceTable):
        return DistanceTable(width, table)
    return None if table is None else RelativeBuckets(table)
