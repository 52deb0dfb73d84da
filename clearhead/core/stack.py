"""An embedding and the layers above it. Legend: B batch, T tokens, S keys, D width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import spec
from clearhead.core.attention import Context
from clearhead.core.cache import Cache
from clearhead.core.embedding import Embedding
from clearhead.core.mask import Visibility
from clearhead.core.norm import build_norm
from clearhead.core.position import RelativeBuckets
from clearhead.core.residual import Layer
from clearhead.errors import InputError


@dataclass(frozen=True)
class Sequence:
    """What one stack reads.

    Args:
        ids: token ids.
        mask: True = a real token; None: all are.
        segments: the segment of each token.
        positions: used in place of the count of real tokens.
        documents: the number of the document of each token; a token sees its own only, and positions restart there.
        embeddings: vectors in place of the rows that the ids name.
        prefix: True = part of the prefix that attentions with a prefix mask show to every token.
    """

    ids: Int[Tensor, "batch tokens"]
    mask: Bool[Tensor, "batch tokens"] | None = None
    segments: Int[Tensor, "batch tokens"] | None = None
    positions: Int[Tensor, "batch tokens"] | None = None
    documents: Int[Tensor, "batch tokens"] | None = None
    embeddings: Float[Tensor, "batch tokens width"] | None = None
    prefix: Bool[Tensor, "batch tokens"] | None = None


class Stack(nn.Module):
    """final_norm(layers(embedding(ids)))."""

    def __init__(self, stack: spec.Stack, memory_width: int | None = None) -> None:
        super().__init__()
        self.embedding = Embedding(stack.width, stack.embedding)
        self.score_table = (
            RelativeBuckets(stack.score_table) if isinstance(stack.score_table, spec.RelativeBuckets) else None
        )
        self.layers = nn.ModuleList(Layer(stack.width, layer, memory_width) for layer in stack.layers)
        self.final_norm = build_norm(stack.width, stack.final_norm)

    def forward(
        self,
        sequence: Sequence,
        memory: Float[Tensor, "sentences memory_keys memory_width"] | None = None,
        memory_mask: Bool[Tensor, "sentences memory_keys"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch tokens width"]:
        context = self._context(sequence, memory, memory_mask, cache)
        limit = context.visibility.num_keys if sequence.positions is None else int(sequence.positions.max()) + 1
        x_BTD = self.embedding(sequence.ids, context.query_position, limit, sequence.segments, sequence.embeddings)
        for layer in self.layers:
            x_BTD = layer(x_BTD, context)
        return self.final_norm(x_BTD)

    def _context(
        self, sequence: Sequence, memory: Tensor | None, memory_mask: Tensor | None, cache: Cache | None
    ) -> Context:
        rows, queries = sequence.ids.shape
        device = sequence.ids.device
        mask, prefix = sequence.mask, sequence.prefix
        if mask is not None and mask.dtype != torch.bool:
            raise InputError(f"mask must be boolean, True = a real token; got {mask.dtype}")
        if cache is not None:
            if sequence.documents is not None or sequence.positions is not None:
                raise InputError("a cache counts positions by itself; positions and documents cannot be given with it")
            mask = cache.extend(mask, rows, queries, device)
        keys = queries if cache is None else cache.length
        position = (
            _positions(mask, sequence.documents, keys, device) if sequence.positions is None else sequence.positions
        )
        if prefix is not None:
            prefix = F.pad(prefix, (keys - queries, 0))  # what a cache holds lies before every query anyway
        visibility = Visibility(queries, keys, mask, sequence.documents, prefix=prefix)
        return Context(visibility, position[:, keys - queries :], position, memory, memory_mask, cache)


def _positions(
    mask: Bool[Tensor, "batch keys"] | None,
    documents: Int[Tensor, "batch keys"] | None,
    num_keys: int,
    device: torch.device,
) -> Int[Tensor, "batch_or_1 keys"]:
    """Count the real tokens before each token of the same document."""
    count = torch.arange(num_keys, device=device)[None] if mask is None else mask.cumsum(dim=1) - mask.long()
    if documents is not None:
        count = count.expand(documents.shape)
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        count = count - torch.where(starts, count, 0).cummax(dim=1).values
    return count if mask is None else count * mask  # padding needs no position of its own
