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
from clearhead.core.rare.disentangled import DistanceTable
from clearhead.core.rare.rope_scaling import depends_on_length, sequence_lengths
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
        declared_length: how many tokens the sequence of each row counts for rotations that depend on it; None: those
            that are there.
    """

    ids: Int[Tensor, "batch tokens"]
    mask: Bool[Tensor, "batch tokens"] | None = None
    segments: Int[Tensor, "batch tokens"] | None = None
    positions: Int[Tensor, "batch tokens"] | None = None
    documents: Int[Tensor, "batch tokens"] | None = None
    embeddings: Float[Tensor, "batch tokens width"] | None = None
    prefix: Bool[Tensor, "batch tokens"] | None = None
    declared_length: int | Int[Tensor, " batch"] | None = None


class Stack(nn.Module):
    """projection_out(final_norm(layers(embedding(ids)))).

    Layers that share their weights are there once and run at several depths. Source: arXiv 1909.11942, section 3.1.
    """

    def __init__(self, stack: spec.Stack, memory_width: int | None = None) -> None:
        super().__init__()
        self.embedding = Embedding(stack.width, stack.embedding)
        self.score_table = _build_score_table(stack)
        self.order = stack.sharing or tuple(range(len(stack.layers)))
        self.layers = nn.ModuleList(Layer(stack.width, layer, memory_width) for layer in stack.layers)
        self.final_norm = build_norm(stack.width, stack.final_norm)
        out = stack.projection_out
        self.projection_out = nn.Linear(stack.width, out.size, bias=out.bias) if out else nn.Identity()
        self.original_length = _original_length(stack)

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
        for depth, index in enumerate(self.order):
            context.depth = depth
            x_BTD = self.layers[index](x_BTD, context)
        return self.projection_out(self.final_norm(x_BTD))

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
        length = None if self.original_length is None else self._lengths(sequence, position, cache)[:, keys - queries :]
        return Context(visibility, position[:, keys - queries :], position, memory, memory_mask, cache, length)

    def _lengths(
        self, sequence: Sequence, position: Int[Tensor, "#batch keys"], cache: Cache | None
    ) -> Int[Tensor, "batch keys"]:
        """Return how long the sequence of each token is or will be, which decides how rotations are stretched."""
        length = sequence_lengths(position, sequence.documents)
        declared = sequence.declared_length if cache is None else cache.declared_length
        if cache is not None and sequence.declared_length is not None:
            raise InputError("the length of a cached sequence is declared to its cache: Cache(declared_length=...)")
        longest = int(length.max()) if length.numel() else 0
        if declared is None:
            if cache is not None and self.original_length is not None and longest > self.original_length:
                raise InputError(
                    f"a cached sequence of {longest} tokens is longer than the {self.original_length} up to which "
                    "this model turns all tokens alike; say how long it will get: Cache(declared_length=...)"
                )
            return length
        declared = torch.as_tensor(declared, device=length.device).reshape(-1, 1)
        if bool((length > declared).any()):
            raise InputError(f"a sequence of {longest} tokens is longer than its declared length")
        return declared.expand(max(len(declared), len(length)), length.shape[1])


def _build_score_table(stack: spec.Stack) -> RelativeBuckets | DistanceTable | None:
    match stack.score_table:
        case spec.RelativeBuckets() as buckets:
            return RelativeBuckets(buckets)
        case spec.DistanceTable() as table:
            return DistanceTable(stack.width, table)
        case None:
            return None


def _original_length(stack: spec.Stack) -> int | None:
    """Return up to which length no rotation of a stack depends on the length; None: none ever does."""
    rotations = (node for _, node in spec.walk(stack) if isinstance(node, spec.Rotary))
    scalings = [rotary.scaling for rotary in rotations if depends_on_length(rotary)]
    return min((scaling.original_length for scaling in scalings), default=None)  # type: ignore[union-attr]


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
