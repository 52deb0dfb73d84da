"""The mask algebra: which keys a query may attend to. Legend: B batch, T queries, S keys.

A mask is boolean and True means "may attend". Masks are joined with "and"; None means a mask that is True
everywhere, so that nothing is built, read or added where nothing is hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from clearhead import spec
from clearhead.core.shapes import MayAttend
from clearhead.errors import InputError

AnyMask = spec.Full | spec.Causal | spec.Window | spec.Prefix


def check_boolean(name: str, mask: Tensor | None) -> None:
    """Refuse a mask of numbers: its polarity is ambiguous, and a kernel would add it to the scores."""
    if mask is not None and mask.dtype != torch.bool:
        raise InputError(f"{name} must be boolean, True = may attend; got {mask.dtype}")


@dataclass(frozen=True)
class Masking:
    """What one call masks, beside the structure of each attention's own mask. None hides nothing."""

    num_queries: int  # tokens of this call; they are the last ones of the keys
    num_keys: int  # all tokens, cached ones included
    key_mask: Bool[Tensor, "batch keys"] | None = None  # True = a real token
    documents: Int[Tensor, "batch keys"] | None = None  # the number of the document of each token
    allowed: MayAttend | None = None  # a mask of the caller, in addition
    prefix: Bool[Tensor, "batch keys"] | None = None  # True = a token that a prefix mask lets all attend to
    rows: slice | None = None  # the queries that a mask is built for; None: all

    def is_only_causal(self, mask: AnyMask) -> bool:
        """True where the causal triangle is the whole mask, so that a kernel can skip the hidden half."""
        is_triangle = isinstance(mask, spec.Causal) or (isinstance(mask, spec.Prefix) and self.prefix is None)
        hides_nothing_else = self.key_mask is None and self.documents is None and self.allowed is None
        return is_triangle and hides_nothing_else and self.num_queries == self.num_keys > 1

    def build(self, mask: AnyMask, device: torch.device) -> MayAttend | None:
        """Join structure, padding, documents and the caller's mask into one, or None where nothing is hidden."""
        first, rows = max(0, self.num_keys - self.num_queries), self.rows or slice(None)
        index = torch.arange(max(self.num_keys, self.num_queries), device=device)[None]
        if isinstance(mask, spec.Window) and self.key_mask is not None:
            index = self.key_mask.cumsum(dim=1)  # padding between two tokens is no distance
        query, key = index[:, first : first + self.num_queries][:, rows, None], index[:, None, : self.num_keys]
        prefix = self.prefix if isinstance(mask, spec.Prefix) else None
        masks: list[Tensor] = []
        if isinstance(mask, spec.Window):
            masks.append((query - key <= mask.before) & (key - query <= mask.after))
        elif not isinstance(mask, spec.Full) and self.num_queries > 1:  # the newest token attends to all that are there
            masks.append(key <= query if prefix is None else (key <= query) | prefix[:, None, :])
        if self.key_mask is not None:
            masks.append(self.key_mask[:, None, :])
        if self.documents is not None:
            masks.append(self.documents[:, first:][:, rows, None] == self.documents[:, None, :])
        by_head = [mask[:, None] for mask in masks] + ([] if self.allowed is None else [self.allowed])
        return reduce(torch.logical_and, by_head) if by_head else None
