"""The input of a stack, and the context that its attentions share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from clearhead import spec
from clearhead.core.cache import Cache
from clearhead.core.mask import Masking
from clearhead.core.position import rotary_angles
from clearhead.core.rare.rope_scaling import depends_on_length, total_lengths
from clearhead.errors import InputError


@dataclass(frozen=True)
class Sequence:
    """The input of one stack.

    Args:
        ids: token ids.
        mask: True = a real token; None: all are.
        segments: the segment of each token.
        positions: used in place of the count of real tokens.
        documents: the number of the document of each token; a token sees its own only, and positions restart there.
        embeddings: vectors in place of the rows that the ids name.
        prefix: True = part of the prefix, to which attentions with a prefix mask let every token attend.
        total_length: how many tokens each sequence will have in the end, for RoPE scaling that depends on it; None:
            those that are there.
    """

    ids: Int[Tensor, "batch tokens"]
    mask: Bool[Tensor, "batch tokens"] | None = None
    segments: Int[Tensor, "batch tokens"] | None = None
    positions: Int[Tensor, "batch tokens"] | None = None
    documents: Int[Tensor, "batch tokens"] | None = None
    embeddings: Float[Tensor, "batch tokens width"] | None = None
    prefix: Bool[Tensor, "batch tokens"] | None = None
    total_length: int | Int[Tensor, " batch"] | None = None


@dataclass
class Context:
    """The context that the attentions of one call of a stack share."""

    masking: Masking
    query_position: Int[Tensor, "batch queries"]
    key_position: Int[Tensor, "batch keys"]
    memory: Float[Tensor, "sentences memory_keys memory_width"] | None = None
    memory_mask: Bool[Tensor, "sentences memory_keys"] | None = None
    cache: Cache | None = None
    total_length: int | Int[Tensor, " rows"] | None = None
    depth: int = 0  # how many layers ran before
    shared: dict[object, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, sequence: Sequence, memory: Tensor | None, memory_mask: Tensor | None, cache: Cache | None) -> Context:
        """Build the context of a call, and extend its cache by the tokens of the call.

        Raises:
            InputError: a mask that is not boolean, or an argument that a cache excludes.
        """
        (rows, queries), device = sequence.ids.shape, sequence.ids.device
        mask, prefix, total_length = sequence.mask, sequence.prefix, sequence.total_length
        if mask is not None and mask.dtype != torch.bool:
            raise InputError(f"mask must be boolean, True = a real token; got {mask.dtype}")
        if cache is not None:
            if sequence.documents is not None or sequence.positions is not None:
                raise InputError("a cache counts positions by itself; positions and documents cannot be given with it")
            if total_length is not None:
                raise InputError("the total length of a cached sequence belongs to its cache: Cache(total_length=...)")
            mask, total_length = cache.extend(mask, rows, queries, device), cache.total_length
        keys = queries if cache is None else cache.length
        position = sequence.positions
        if position is None:
            position = token_positions(mask, sequence.documents, keys, device)
        if prefix is not None:
            prefix = F.pad(prefix, (keys - queries, 0))  # cached tokens are before every query anyway
        masking = Masking(queries, keys, mask, sequence.documents, prefix=prefix)
        return cls(masking, position[:, keys - queries :], position, memory, memory_mask, cache, total_length)

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """Return a value that several attentions share, made when the first one needs it."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]

    def rotation(self, rotary: spec.Rotary, head_size: int) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines that rotate the tokens of this call."""
        length = None
        if depends_on_length(rotary):
            length = total_lengths(
                rotary, self.key_position, self.masking.documents, self.total_length, self.cache is not None
            )[:, -self.masking.num_queries :]
        return rotary_angles(self.query_position, rotary, head_size, length)


def token_positions(
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
