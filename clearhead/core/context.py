"""Input, masks and KV cache of one pass through a stack, and the context that all its layers share.

Masks are boolean: True means "may attend". Several masks are combined with "and". None means no mask, at no cost.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from clearhead import spec
from clearhead.base.arguments import check_tensor, explain_types
from clearhead.base.errors import InputError
from clearhead.base.printing import Printed
from clearhead.core.kernels.key_values import KeyValues
from clearhead.core.kernels.positions import token_positions
from clearhead.core.shapes import Ids, MayAttend, Memory, Real, RealMemory, States


@dataclass(frozen=True, repr=False)
class Sequence(Printed):
    """Input of one stack: token ids with mask, segments, positions, documents, embeddings and final length."""

    ids: Ids
    mask: Real | None = None  # None: all tokens are real
    segments: Ids | None = None
    positions: Ids | None = None  # None: the count of real tokens before
    documents: Ids | None = None  # numbers of packed documents; a token sees only its own
    embeddings: States | None = None  # replace the table rows of the ids
    total_length: int | Int[Tensor, " batch"] | None = None  # final length, for RoPE scaling that depends on it


@dataclass(frozen=True)
class Masking:
    """Padding, packed documents and the caller's mask of one call; `build` combines them with an attention's mask."""

    num_queries: int  # tokens of this call; they are the last ones of the keys
    num_keys: int  # all tokens, cached ones included
    key_mask: Bool[Tensor, "batch keys"] | None = None  # True = a real token
    documents: Int[Tensor, "batch keys"] | None = None  # the number of the document of each token
    allowed: MayAttend | None = None  # a mask of the caller, in addition
    rows: slice | None = None  # the queries that a mask is built for; None: all

    def is_only_causal(self, mask: spec.Mask) -> bool:
        """Return whether `mask` is causal and no other mask applies, so that a kernel can skip half the work."""
        hides_nothing_else = self.key_mask is None and self.documents is None and self.allowed is None
        return isinstance(mask, spec.Causal) and hides_nothing_else and self.num_queries == self.num_keys > 1

    def build(self, mask: spec.Mask, device: torch.device) -> MayAttend | None:
        """Return one mask that combines the attention's mask, padding, documents and the caller's mask, or None."""
        first, rows = max(0, self.num_keys - self.num_queries), self.rows or slice(None)
        index = torch.arange(max(self.num_keys, self.num_queries), device=device)[None]
        if isinstance(mask, spec.Window) and self.key_mask is not None:
            index = self.key_mask.cumsum(dim=1)  # padding between two tokens adds no distance
        query, key = index[:, first : first + self.num_queries][:, rows, None], index[:, None, : self.num_keys]
        masks: list[Tensor] = []
        if isinstance(mask, spec.Window):
            masks.append((query - key <= mask.before) & (key - query <= mask.after))
        elif isinstance(mask, spec.Causal) and self.num_queries > 1:  # a single new token attends to all keys
            masks.append(key <= query)
        if self.key_mask is not None:
            masks.append(self.key_mask[:, None, :])
        if self.documents is not None:
            masks.append(self.documents[:, first:][:, rows, None] == self.documents[:, None, :])
        by_head = [each[:, None] for each in masks] + ([] if self.allowed is None else [self.allowed])
        return reduce(torch.logical_and, by_head) if by_head else None


@explain_types
class Cache(Printed):
    """KV cache of a decoder; it grows by the tokens of each call.

    Keys and values of the encoder output are stored once per sentence and shared by its beams (adjacent rows).
    A cache belongs to one sequence of calls of one model and holds no gradients.

    Args:
        total_length: final number of tokens, for all rows or per row. Only RoPE scaling that depends on the length
            needs it, for sequences beyond the original length: cached keys are not rotated again. None means unknown.
    """

    def __init__(self, total_length: int | Int[Tensor, " rows"] | None = None) -> None:
        self.total_length = total_length
        # Keys are (attention, depth): layers that share their weights still see different states.
        self.self_attention: defaultdict[tuple[nn.Module, int], KeyValues] = defaultdict(KeyValues)
        self.memory_attention: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]] = {}
        self.states: defaultdict[tuple[nn.Module, int], dict[str, Tensor]] = defaultdict(dict)  # of custom modules
        self.length: int = 0
        self.mask: Bool[Tensor, "rows keys"] | None = None
        self.memory_mask: Bool[Tensor, "sentences keys"] | None = None

    def extend(self, ids: Ids, mask: Real | None) -> Bool[Tensor, "batch keys"] | None:
        """Add the tokens of a call to the length and the mask; return the mask of all tokens (None: no padding)."""
        if mask is not None or self.mask is not None:
            old = ids.new_ones(len(ids), self.length, dtype=torch.bool) if self.mask is None else self.mask
            new = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
            self.mask = torch.cat([old, new], dim=1)
        self.length += ids.shape[1]
        return self.mask

    def select(self, rows: Int[Tensor, " new_rows"], memory_rows: Int[Tensor, " new_sentences"] | None = None) -> None:
        """Reorder, drop or repeat rows: new row i is old row `rows[i]`; `memory_rows` selects source sentences."""
        for entry in self.self_attention.values():
            entry.select(rows)
        for tensors in self.states.values():
            tensors.update({name: tensor[rows] for name, tensor in tensors.items()})
        if self.mask is not None:
            self.mask = self.mask[rows]
        if isinstance(self.total_length, Tensor):
            self.total_length = self.total_length[rows]
        if memory_rows is not None:
            for owner, (key, value) in self.memory_attention.items():
                self.memory_attention[owner] = (key[memory_rows], value[memory_rows])
            if self.memory_mask is not None:
                self.memory_mask = self.memory_mask[memory_rows]


@dataclass
class Context:
    """Positions, masks and KV cache that all layers share in one call of a stack."""

    masking: Masking
    query_position: Int[Tensor, "batch queries"]
    key_position: Int[Tensor, "batch keys"]
    memory: Memory | None = None
    memory_mask: RealMemory | None = None
    cache: Cache | None = None
    total_length: int | Int[Tensor, " rows"] | None = None
    depth: int = 0  # number of layers that ran before
    masks: dict[int, MayAttend | None] = field(default_factory=dict)  # by `mask_number` of the attention
    shared: dict[object, Any] = field(default_factory=dict)  # other values that several attentions need

    @classmethod
    def of(cls, sequence: Sequence, memory: Tensor | None, memory_mask: Tensor | None, cache: Cache | None) -> Context:
        """Build the context of one call of a stack; a cache is extended by the tokens of the call.

        Raises:
            InputError: a mask that is not boolean, or an argument that a cache does not allow.
        """
        check_tensor("mask", sequence.mask, "mask", ["batch tokens"], {})
        ids, mask, positions, documents = sequence.ids, sequence.mask, sequence.positions, sequence.documents
        keys, total_length = ids.shape[1], sequence.total_length
        if cache is not None:
            if documents is not None or positions is not None:
                raise InputError("a cache counts positions itself, so the call must leave positions and documents out")
            if total_length is not None:
                raise InputError("with a cache, total_length belongs to the cache: pass Cache(total_length=...)")
            mask = cache.extend(ids, mask)
            keys, total_length = cache.length, cache.total_length
        if positions is None:
            positions = token_positions(mask, documents, keys, ids.device)
        first = keys - ids.shape[1]  # the tokens of this call are the last ones
        masking = Masking(ids.shape[1], keys, mask, documents)
        return cls(masking, positions[:, first:], positions, memory, memory_mask, cache, total_length)

    def cached_tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the dict of tensors [batch, ...] that a custom module caches between calls, and updates."""
        return {} if self.cache is None else self.cache.states[module, self.depth]
