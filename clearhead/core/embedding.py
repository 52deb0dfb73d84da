"""Embedding of token ids and positions: the first x of the equation in `stack`. Legend: B batch, T tokens, D width.

Rotary positions are in `attention`, and biases on the scores by distance are in `rare.score_bias`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.base.printing import PrintedModule
from clearhead.base.tied import Tied
from clearhead.core.kernels.positions import sinusoidal_table
from clearhead.core.norm import build_norm
from clearhead.core.shapes import Ids, States
from clearhead.spec.registry import build_part


class Table(PrintedModule, nn.Module):
    """Trained embedding table [rows, width]; ids of tokens or segments select its rows."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.num_rows: int = rows
        self.weight: nn.Parameter = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids_BT: Ids) -> States:
        return F.embedding(ids_BT, self.weight)


class SinusoidalPosition(PrintedModule, nn.Module):
    """Sinusoidal position vectors, read from a table that grows with the longest sequence so far."""

    def __init__(self, width: int, position: spec.Sinusoidal) -> None:
        super().__init__()
        self.position: spec.Sinusoidal = position
        self.table: Tensor = torch.zeros(0, width, device="cpu")  # computed, never loaded: no part of the state

    def forward(self, position_BT: Int[Tensor, "batch tokens"], limit: int) -> States:
        needed, table = limit + self.position.offset, self.table
        if len(table) < needed or table.device != position_BT.device:
            table = sinusoidal_table(max(needed, 2 * len(table)), table.shape[1], self.position).to(position_BT.device)
            self.table = table  # another thread may replace it by a shorter one
        return F.embedding(position_BT + self.position.offset, table)


class LearnedPosition(PrintedModule, nn.Module):
    """Trained position vectors [rows, width]; a position without a row raises `InputError`."""

    def __init__(self, width: int, position: spec.Learned) -> None:
        super().__init__()
        self.offset: int = position.offset
        self.weight: nn.Parameter = nn.Parameter(torch.empty(position.rows, width))

    def forward(self, position_BT: Int[Tensor, "batch tokens"], limit: int) -> States:
        # The limit counts padding too, so the exact maximum is computed only if this cheap bound does not hold.
        if limit + self.offset > len(self.weight) and int(position_BT.max()) + self.offset >= len(self.weight):
            raise InputError(
                f"a sequence of {int(position_BT.max()) + 1} tokens is longer than the model's "
                f"{len(self.weight) - self.offset} positions; shorten or split it"
            )
        return F.embedding(position_BT + self.offset, self.weight)


def build_position(width: int, position: spec.EmbeddingPosition | None) -> nn.Module | None:
    """Build the module of position vectors that are added to an embedding; None if the spec has no positions."""
    if position is None:
        return None
    if isinstance(position, spec.Sinusoidal):
        return SinusoidalPosition(width, position)
    return LearnedPosition(width, position) if isinstance(position, spec.Learned) else build_part(position, width)


class Embedding(PrintedModule, nn.Module):
    """Input embedding: dropout(norm(word_norm(table[ids] * scale) + segments[segment] + positions[position])).

    A table of another width is projected to `width` before or after the norm. Source: arXiv 1706.03762, section 3.4;
    segments and norm: arXiv 1810.04805, section 3; projection: arXiv 1909.11942, section 3.1.
    """

    tied: Tied[Table]

    def __init__(self, width: int, embedding: spec.Embedding) -> None:
        super().__init__()
        rows_width, projection, table = embedding.width or width, embedding.projection, embedding.table
        self.project_at = projection.place if projection else "after_norm"
        self.scale: float = embedding.scale
        self.is_scale_rounded: bool = embedding.scale_rounding == "weights"
        self.table: Table | None = Table(table.rows, rows_width) if isinstance(table, spec.Table) else None
        self.word_norm: nn.Module = build_norm(rows_width, embedding.word_norm)
        self.segments: Table | None = Table(embedding.num_segments, rows_width) if embedding.num_segments else None
        self.position: nn.Module | None = build_position(rows_width, embedding.position)
        self.norm: nn.Module = build_norm(width if self.project_at == "before_norm" else rows_width, embedding.norm)
        self.projection: nn.Module = nn.Linear(rows_width, width, bias=projection.bias) if projection else nn.Identity()
        self.dropout: nn.Dropout = nn.Dropout(embedding.dropout)

    @property
    def rows(self) -> Table:
        """The embedding table, which another module owns if the weights are tied."""
        return self.tied.module if self.table is None else self.table

    def forward(
        self, ids_BT: Ids, position_BT: Int[Tensor, "#batch tokens"], limit: int, segments_BT: Ids | None = None,
        embeddings_BTD: Float[Tensor, "batch tokens rows_width"] | None = None,
    ) -> States:  # fmt: skip
        """Return the embeddings of ids, or of `embeddings_BTD` in place of table rows; `limit` bounds the positions."""
        x_BTD = self.rows(ids_BT) if embeddings_BTD is None else embeddings_BTD
        if self.scale != 1.0:
            # A Python number is applied in float32; a tensor is rounded to the dtype of the weights first.
            x_BTD = x_BTD * (torch.tensor(self.scale, dtype=x_BTD.dtype) if self.is_scale_rounded else self.scale)
        x_BTD = self.word_norm(x_BTD)
        if self.segments is not None:
            x_BTD = x_BTD + self.segments(torch.zeros_like(ids_BT) if segments_BT is None else segments_BT)
        elif segments_BT is not None:
            raise InputError("segments need a segment table; this model has num_segments 0: leave segments out")
        if self.position is not None:
            x_BTD = x_BTD + self.position(position_BT, limit).to(x_BTD.dtype)
        x_BTD = self.norm(self.projection(x_BTD) if self.project_at == "before_norm" else x_BTD)
        return self.dropout(self.projection(x_BTD) if self.project_at == "after_norm" else x_BTD)
