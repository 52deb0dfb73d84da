"""Embeddings: ids to vectors. Legend: B batch, T tokens, D width."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.core.norm import build_norm
from clearhead.core.position import build_embedding_position
from clearhead.errors import InputError
from clearhead.kernels.dropout import Dropout


class Table(nn.Module):
    """A trained table [rows, width], looked up by id."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids_BT: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens width"]:
        return F.embedding(ids_BT, self.weight)


class Embedding(nn.Module):
    """dropout(norm(word_norm(table[ids] * scale) + segments[segment] + positions[position])).

    A table of another width is projected: before the sum, before the norm or after it.
    Source: arXiv 1706.03762, section 3.4; segments and norm: arXiv 1810.04805, section 3; projection: arXiv 1909.11942,
    section 3.1.
    """

    def __init__(self, width: int, embedding: spec.Embedding) -> None:
        super().__init__()
        rows_width = embedding.width or width
        place = embedding.projection.place if embedding.projection else None
        summed_width = width if place == "before_sum" else rows_width
        normed_width = rows_width if place == "after_norm" else width
        self.scale, self.is_scale_rounded, self.place = embedding.scale, embedding.scale_rounding == "weights", place
        self.table = Table(embedding.table.rows, rows_width) if isinstance(embedding.table, spec.Table) else None
        self.borrowed: tuple[Table, ...] = ()  # in a tuple, so that the table is not registered twice
        self.word_norm = build_norm(rows_width, embedding.word_norm)
        self.segments = Table(embedding.num_segments, summed_width) if embedding.num_segments else None
        self.position = build_embedding_position(summed_width, embedding.position)
        self.norm = build_norm(normed_width, embedding.norm)
        self.projection = (
            nn.Linear(rows_width, width, bias=embedding.projection.bias) if embedding.projection else nn.Identity()
        )
        self.dropout = Dropout(embedding.dropout)

    @property
    def rows(self) -> Table:
        """The table in use: its own, or a tied one."""
        return self.borrowed[0] if self.table is None else self.table

    def forward(
        self,
        ids_BT: Int[Tensor, "batch tokens"],
        position_BT: Int[Tensor, "batch_or_1 tokens"],
        limit: int,
        segments_BT: Int[Tensor, "batch tokens"] | None = None,
        embeddings_BTD: Float[Tensor, "batch tokens rows_width"] | None = None,
    ) -> Float[Tensor, "batch tokens width"]:
        """Embed ids, or given vectors.

        Args:
            ids_BT: token ids; not looked up if embeddings are given.
            position_BT: the number of real tokens before each.
            limit: an upper bound of all positions.
            segments_BT: the segment of each token; None: the first everywhere.
            embeddings_BTD: used in place of the rows of the table, before scale and positions.
        """
        x_BTD = self.rows(ids_BT) if embeddings_BTD is None else embeddings_BTD
        if self.scale != 1.0:
            # A Python number is applied in float32; a tensor is rounded to the dtype of the weights first.
            scale = torch.tensor(self.scale, dtype=x_BTD.dtype) if self.is_scale_rounded else self.scale
            x_BTD = x_BTD * scale
        x_BTD = self.word_norm(x_BTD)
        if self.place == "before_sum":
            x_BTD = self.projection(x_BTD)
        if self.segments is not None:
            x_BTD = x_BTD + self.segments(torch.zeros_like(ids_BT) if segments_BT is None else segments_BT)
        elif segments_BT is not None:
            raise InputError("segments were given, but this model has no table of segments (num_segments is 0)")
        if self.position is not None:
            x_BTD = x_BTD + self.position(position_BT, limit).to(x_BTD.dtype)
        if self.place == "before_norm":
            x_BTD = self.projection(x_BTD)
        x_BTD = self.norm(x_BTD)
        return self.dropout(self.projection(x_BTD) if self.place == "after_norm" else x_BTD)
