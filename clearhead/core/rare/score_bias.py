"""Score biases by distance: ALiBi and trained bucket tables. Legend: B batch, T queries, S keys."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.base.tied import Tied
from clearhead.core.attention import Attention
from clearhead.core.context import Context
from clearhead.core.kernels.positions import alibi_bias, relative_bucket
from clearhead.core.rare.disentangled import DistanceTable
from clearhead.core.shapes import Keys, Queries, Scores


class RelativeBuckets(nn.Module):
    """Trained bias [buckets, heads] on attention scores, one row per bucket of key-query distances."""

    def __init__(self, buckets: spec.RelativeBuckets) -> None:
        super().__init__()
        self.buckets = buckets
        self.weight: nn.Parameter = nn.Parameter(torch.empty(buckets.count, buckets.num_heads))

    def forward(self, query_position: Int[Tensor, "batch queries"], key_position: Int[Tensor, "batch keys"]) -> Scores:
        relative, buckets = key_position[:, None, :] - query_position[:, :, None], self.buckets
        bucket_BTS = relative_bucket(relative, buckets.count, buckets.max_distance, buckets.bidirectional)
        return F.embedding(bucket_BTS, self.weight).permute(0, 3, 1, 2)


class BiasedAttention(Attention):
    """Attention with an ALiBi bias, or with a trained bias per distance bucket, from a separate or a shared table."""

    tied: Tied[RelativeBuckets]

    def __init__(self, width: int, attention: spec.Attention) -> None:
        super().__init__(width, attention)
        kind = attention.score_bias
        self.score_bias: nn.Module | None = RelativeBuckets(kind) if isinstance(kind, spec.RelativeBuckets) else None

    def bias(self, query: Queries, key: Keys, context: Context) -> Scores | None:
        kind, positions, shared = self.spec.score_bias, (context.query_position, context.key_position), context.shared
        if isinstance(kind, spec.Alibi):
            name = ("alibi", self.spec.num_heads, kind.rounding, kind.slopes)
            if name not in shared:
                shared[name] = alibi_bias(*positions, self.spec.num_heads, kind)
            return shared[name] * self.scale if kind.scaled else shared[name]
        table = self.score_bias or self.tied.module
        if table not in shared:
            shared[table] = table(*positions)
        return shared[table]


def build_score_table(width: int, table: spec.RelativeBuckets | spec.DistanceTable | None) -> nn.Module | None:
    """Build the distance table that all attentions of a stack share; None if the spec has no such table."""
    if isinstance(table, spec.DistanceTable):
        return DistanceTable(width, table)
    return None if table is None else RelativeBuckets(table)
