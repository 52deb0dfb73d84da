"""The mask algebra: who may attend to whom. Legend: B batch, T queries, S keys.

A mask is boolean and True means "may attend". Rules are joined with "and"; None stands for a mask that is True
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
    """Say what the kind of mask allows, by the places of queries and keys in the sequence."""
    if isinstance(mask, spec.Full):
        return None
    if isinstance(mask, spec.Causal | spec.Prefix):
        if query_index.shape[1] == 1:  # the newest token sees all that is there
            return None
        return (key_index[:, None, :] <= query_index[:, :, None])[:, None]
    distance = query_index[:, :, None] - key_index[:, None, :]
    return ((distance <= mask.before) & (-distance <= mask.after))[:, None]


@dataclass(frozen=True)
class Visibility:
    """What the tokens of one call may see of the keys, apart from the structure of each attention's own mask.

    Args:
        num_queries: how many tokens ask; they are the last ones of the keys.
        num_keys: how many tokens can be seen, cached ones included.
        key_mask: True = a real token; None: all are.
        documents: the number of the document each token belongs to; None: all belong together.
        allowed: a mask given from outside, in addition.
        prefix: True = a token that an attention with a prefix mask shows to all; None: there is none.
    """

    num_queries: int
    num_keys: int
    key_mask: Bool[Tensor, "batch keys"] | None = None
    documents: Int[Tensor, "batch keys"] | None = None
    allowed: AttentionMask | None = None
    prefix: Bool[Tensor, "batch keys"] | None = None

    def is_purely_causal(self, mask: AnyMask) -> bool:
        """True where the causal triangle says everything, so that a kernel can skip the hidden half."""
        unhidden = self.key_mask is None and self.documents is None and self.allowed is None
        triangle = isinstance(mask, spec.Causal) or (isinstance(mask, spec.Prefix) and self.prefix is None)
        return triangle and unhidden and self.num_queries == self.num_keys > 1

    def resolve(self, mask: AnyMask, device: torch.device) -> AttentionMask | None:
        """Join structure, padding, documents and the mask from outside into one, or None where all is visible."""
        place = torch.arange(max(self.num_keys, self.num_queries), device=device)[None]
        if self.key_mask is not None and isinstance(mask, spec.Window):
            place = self.key_mask.cumsum(dim=1)  # padding between two tokens is no distance
        first = max(0, self.num_keys - self.num_queries)
        result = structure(mask, place[:, first : first + self.num_queries], place[:, : self.num_keys])
        if isinstance(mask, spec.Prefix) and self.prefix is not None and result is not None:
            result = result | self.prefix[:, None, None, :]
        if self.key_mask is not None:
            result = both(result, self.key_mask[:, None, None, :])
        if self.documents is not None:
            queries = self.documents[:, self.num_keys - self.num_queries :]
            result = both(result, (queries[:, :, None] == self.documents[:, None, :])[:, None])
        return both(result, self.allowed)
