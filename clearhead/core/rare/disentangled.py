"""Disentangled attention: scores depend on token states and on trained vectors of query-key distances.

Legend: B batch, Q queries, S keys, D width, H heads, E head size, R table rows.
"""

from __future__ import annotations

from functools import reduce

import torch
from jaxtyping import Int
from torch import Tensor, nn

from clearhead import spec
from clearhead.base.tied import Tied
from clearhead.core.attention import Attention
from clearhead.core.context import Context
from clearhead.core.kernels.positions import distance_row
from clearhead.core.norm import build_norm
from clearhead.core.shapes import Keys, Queries, Scores


class DistanceTable(nn.Module):
    """Table [2 * span, width] of trained vectors, one for each query-key distance, with an optional norm."""

    def __init__(self, width: int, table: spec.DistanceTable) -> None:
        super().__init__()
        self.spec = table
        self.weight: nn.Parameter = nn.Parameter(torch.empty(2 * table.span, width))
        self.norm: nn.Module = build_norm(width, table.norm)

    def forward(
        self, query_position: Int[Tensor, "#batch queries"], key_position: Int[Tensor, "#batch keys"]
    ) -> Int[Tensor, "batch 1 queries keys"]:
        return distance_row(query_position[:, :, None] - key_position[:, None, :], self.spec)[:, None]


class PositionProjections(nn.Module):
    """Key and query projections of distance vectors (None: shared with the tokens), and the tied distance table."""

    tied: Tied[DistanceTable]

    def __init__(self, width: int, attention: spec.Attention, scores: spec.Disentangled) -> None:
        super().__init__()
        inner = attention.num_heads * attention.head_size
        separate = () if scores.shared_projections else scores.terms
        self.position_key: nn.Linear | None = nn.Linear(width, inner) if "content_to_position" in separate else None
        self.position_query: nn.Linear | None = nn.Linear(width, inner) if "position_to_content" in separate else None


class DisentangledAttention(Attention):
    """Attention that adds (query . key_map(row) + key . query_map(row)) * scale to scores; row: distance vector.

    The maps are the key and query projections of the attention, or separate ones. Source: arXiv 2006.03654, eq. 4.
    """

    def __init__(self, width: int, attention: spec.Attention) -> None:
        super().__init__(width, attention)
        assert isinstance(attention.score_bias, spec.Disentangled)
        self.terms: tuple[str, ...] = attention.score_bias.terms
        self.score_bias: PositionProjections = PositionProjections(width, attention, attention.score_bias)

    def bias(self, query: Queries, key: Keys, context: Context) -> Scores | None:
        maps, table = self.score_bias, self.score_bias.tied.module
        if table not in context.shared:
            context.shared[table] = table(context.query_position, context.key_position)
        row_BQS = context.shared[table]
        rows_RD = table.norm(table.weight)[None]

        def products(content: Tensor, project: nn.Module, row: Tensor) -> Tensor:
            all_rows = content @ self.split(project(rows_RD)).transpose(-1, -2)
            return all_rows.gather(-1, row.expand(*all_rows.shape[:3], -1))

        terms = []
        if "content_to_position" in self.terms:
            terms.append(products(query, maps.position_key or self.key, row_BQS))
        if "position_to_content" in self.terms:
            terms.append(products(key, maps.position_query or self.query, row_BQS.transpose(-1, -2)).transpose(-1, -2))
        return reduce(torch.add, terms) * self.scale
