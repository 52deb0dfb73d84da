"""Scores of content with distance. Legend: B batch, Q queries, S keys, D width, H heads, E head size, R table rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead import spec
from clearhead.core.norm import build_norm

Split = Callable[[nn.Module, Tensor], Tensor]


def distance_row(distance: Int[Tensor, "*axes"], table: spec.DistanceTable) -> Int[Tensor, "*axes"]:
    """Number the row of query position minus key position; near distances have their own, far ones share buckets.

    Source: arXiv 2006.03654, eq. 3; the buckets are those of its released code.
    """
    if table.buckets is not None and table.max_distance is not None:
        middle = table.buckets // 2
        ratio = distance.abs().clamp(min=middle).float() / middle  # the bound keeps the logarithm of zero away
        far = torch.ceil(ratio.log() / math.log((table.max_distance - 1) / middle) * (middle - 1)).long() + middle
        distance = torch.where(distance.abs() <= middle, distance, distance.sign() * far)
    return (distance + table.span).clamp(0, 2 * table.span - 1)


class DistanceTable(nn.Module):
    """Trained vectors [2 * span, width], one for each distance, normed where the spec says so."""

    def __init__(self, width: int, table: spec.DistanceTable) -> None:
        super().__init__()
        self.spec = table
        self.weight = nn.Parameter(torch.empty(2 * table.span, width))
        self.norm = build_norm(width, table.norm)

    def forward(
        self, query_position: Int[Tensor, "#batch queries"], key_position: Int[Tensor, "#batch keys"]
    ) -> Int[Tensor, "batch 1 queries keys"]:
        return distance_row(query_position[:, :, None] - key_position[:, None, :], self.spec)[:, None]


class Disentangled(nn.Module):
    """query . key_map(row) + key . query_map(row), row the table's for the distance of query and key.

    The maps are those of the attention, or separate ones. Source: arXiv 2006.03654, eq. 4.
    """

    def __init__(self, width: int, attention: spec.Attention, scores: spec.Disentangled) -> None:
        super().__init__()
        self.terms = scores.terms
        inner = attention.num_heads * attention.head_size
        own = () if scores.shared_projections else scores.terms
        self.position_key = nn.Linear(width, inner) if "content_to_position" in own else None
        self.position_query = nn.Linear(width, inner) if "position_to_content" in own else None
        self.borrowed: tuple[DistanceTable, ...] = ()  # in a tuple, so that the table is not registered twice

    def forward(
        self,
        query_BHQE: Float[Tensor, "batch heads queries head_size"],
        key_BHSE: Float[Tensor, "batch heads keys head_size"],
        row_BQS: Int[Tensor, "#batch 1 queries keys"],
        maps: tuple[nn.Module, nn.Module, Split],
    ) -> Float[Tensor, "batch heads queries keys"]:
        """Sum the terms.

        Args:
            query_BHQE, key_BHSE: the content.
            row_BQS: the row of the table for each pair.
            maps: of query and key in the attention, and what splits the heads of what they give.
        """
        query_map, key_map, split = maps
        (table,) = self.borrowed
        rows_RD = table.norm(table.weight)[None]
        scores: Tensor | None = None
        for term in self.terms:
            if term == "content_to_position":
                position = split(self.position_key or key_map, rows_RD)
                every = query_BHQE @ position.transpose(-1, -2)
                part = every.gather(-1, row_BQS.expand(*every.shape[:3], -1))
            else:
                position = split(self.position_query or query_map, rows_RD)
                every = key_BHSE @ position.transpose(-1, -2)
                part = every.gather(-1, row_BQS.transpose(-1, -2).expand(*every.shape[:3], -1)).transpose(-1, -2)
            scores = part if scores is None else scores + part
        assert scores is not None
        return scores
