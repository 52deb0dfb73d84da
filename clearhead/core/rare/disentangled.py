"""Disentangled attention.

Legend: B batch, Q queries, S keys, D width, H heads, E head size, R table rows.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Int
from torch import Tensor, nn

from clearhead import spec
from clearhead.core.attention import Attention, Bias, Keys, Queries
from clearhead.core.context import Context
from clearhead.core.norm import build_norm


def distance_row(distance: Int[Tensor, "*axes"], table: spec.DistanceTable) -> Int[Tensor, "*axes"]:
    """Return the table row of query position minus key position; far distances share buckets.

    Source: arXiv 2006.03654, eq. 3; the buckets are those of its released code.
    """
    if table.buckets is not None and table.max_distance is not None:
        middle = table.buckets // 2
        ratio = distance.abs().clamp(min=middle).float() / middle  # the bound keeps the logarithm of zero away
        far = torch.ceil(ratio.log() / math.log((table.max_distance - 1) / middle) * (middle - 1)).long() + middle
        distance = torch.where(distance.abs() <= middle, distance, distance.sign() * far)
    return (distance + table.span).clamp(0, 2 * table.span - 1)


class DistanceTable(nn.Module):
    """Trained vectors [2 * span, width], one for each distance, with an optional norm."""

    def __init__(self, width: int, table: spec.DistanceTable) -> None:
        super().__init__()
        self.spec = table
        self.weight = nn.Parameter(torch.empty(2 * table.span, width))
        self.norm = build_norm(width, table.norm)

    def forward(
        self, query_position: Int[Tensor, "#batch queries"], key_position: Int[Tensor, "#batch keys"]
    ) -> Int[Tensor, "batch 1 queries keys"]:
        return distance_row(query_position[:, :, None] - key_position[:, None, :], self.spec)[:, None]


class PositionProjections(nn.Module):
    """The projections of the distance table that are not those of keys and queries, and the table that they read."""

    def __init__(self, width: int, attention: spec.Attention, scores: spec.Disentangled) -> None:
        super().__init__()
        inner = attention.num_heads * attention.head_size
        own = () if scores.shared_projections else scores.terms
        self.position_key = nn.Linear(width, inner) if "content_to_position" in own else None
        self.position_query = nn.Linear(width, inner) if "position_to_content" in own else None
        self.borrowed: tuple[DistanceTable, ...] = ()  # in a tuple, so that the table is not registered twice


class DisentangledAttention(Attention):
    """scores + (query . key_map(row) + key . query_map(row)) * scale, row the table's for query and key position.

    The maps are the key and query projections of the attention, or separate ones. Source: arXiv 2006.03654, eq. 4.
    """

    def __init__(self, width: int, attention: spec.Attention) -> None:
        super().__init__(width, attention)
        assert isinstance(attention.score_bias, spec.Disentangled)
        self.terms = attention.score_bias.terms
        self.score_bias = PositionProjections(width, attention, attention.score_bias)

    def bias(self, query: Queries, key: Keys, context: Context) -> Bias | None:
        (table,), maps = self.score_bias.borrowed, self.score_bias
        row_BQS = context.once(table, lambda: table(context.query_position, context.key_position))
        rows_RD = table.norm(table.weight)[None]
        scores: Tensor | None = None
        for term in self.terms:
            if term == "content_to_position":
                every = query @ self.split((maps.position_key or self.key)(rows_RD)).transpose(-1, -2)
                part = every.gather(-1, row_BQS.expand(*every.shape[:3], -1))
            else:
                every = key @ self.split((maps.position_query or self.query)(rows_RD)).transpose(-1, -2)
                part = every.gather(-1, row_BQS.transpose(-1, -2).expand(*every.shape[:3], -1)).transpose(-1, -2)
            scores = part if scores is None else scores + part
        assert scores is not None
        return scores * self.scale
