"""The mask algebra: which keys a query may attend to. Legend: B batch, T queries, S keys.

A mask is boolean and True means "may attend". Masks are joined with "and"; None means a mask that is True
everywhere, so that nothing is built, read or added where nothing is hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from clearhead import spec

AnyMask = spec.Full | spec.Causal | spec.Window | spec.Prefix
AttentionMask = Bool[Tensor, "#batch #heads #queries keys"]


def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Join two masks: what both allow."""
    if first is None or second is None:
        return first if second is None else second
    return first & second


def structure(
    mask: AnyMask, query_index: Int[Tensor, "#batch queries"], key_index: Int[Tensor, "#batch keys"]
) -> Bool[Tensor, "#batch 1 queries keys"] | None:
    """Return what a kind of mask allows, by the indices of queries and keys in the sequence."""
    if isinstance(mask, spec.Full):
        return None
    if isinstance(mask, spec.Causal | spec.Prefix):
        return (key_index[:, None, :] <= query_index[:, :, None])[:, None]
    distance = query_index[:, :, None] - key_index[:, None, :]
    return ((distance <= mask.before) & (-distance <= mask.after))[:, None]


@dataclass(frozen=True)
class Masking:
    """What one call masks, beside the structure of each attention's own mask.

    Args:
        num_queries: tokens of this call; they are the last ones of the keys.
        num_keys: all tokens, cached ones included.
        key_mask: True = a real token; None: all are.
        documents: the number of the document of each token; None: all are of one.
        allowed: a mask of the caller, in addition.
        prefix: True = a token of the prefix, to which a prefix mask lets all attend; None: there is none.
        rows: the queries for which a mask is built; None: all.
    """

    num_queries: int
    num_keys: int
    key_mask: Bool[Tensor, "batch keys"] | None = None
    documents: Int[Tensor, "batch keys"] | None = None
    allowed: AttentionMask | None = None
    prefix: Bool[Tensor, "batch keys"] | None = None
    rows: slice | None = None

    def is_only_causal(self, mask: AnyMask) -> bool:
        """True where the causal triangle is the whole mask, so that a kernel can skip the hidden half."""
        is_triangle = isinstance(mask, spec.Causal) or (isinstance(mask, spec.Prefix) and self.prefix is None)
        hides_nothing_else = self.key_mask is None and self.documents is None and self.allowed is None
        return is_triangle and hides_nothing_else and self.num_queries == self.num_keys > 1

    def build(self, mask: AnyMask, device: torch.device) -> AttentionMask | None:
        """Join structure, padding, documents and the caller's mask into one, or None where nothing is hidden."""
        index = torch.arange(max(self.num_keys, self.num_queries), device=device)[None]
        if self.key_mask is not None and isinstance(mask, spec.Window):
            index = self.key_mask.cumsum(dim=1)  # padding between two tokens is no distance
        first = max(0, self.num_keys - self.num_queries)
        rows = slice(None) if self.rows is None else self.rows
        # The newest token attends to all tokens that are there.
        is_newest = self.num_queries == 1 and isinstance(mask, spec.Causal | spec.Prefix)
        query_index = index[:, first : first + self.num_queries][:, rows]
        result = None if is_newest else structure(mask, query_index, index[:, : self.num_keys])
        if isinstance(mask, spec.Prefix) and self.prefix is not None and result is not None:
            result = result | self.prefix[:, None, None, :]
        if self.key_mask is not None:
            result = both(result, self.key_mask[:, None, None, :])
        if self.documents is not None:
            queries = self.documents[:, self.num_keys - self.num_queries :][:, rows]
            result = both(result, (queries[:, :, None] == self.documents[:, None, :])[:, None])
        return both(result, self.allowed)
