"""The input of a stack, and the context that its attentions share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from clearhead.core.cache import Cache
from clearhead.core.mask import Masking, check_boolean
from clearhead.core.shapes import Ids, Memory, Real, RealMemory, States
from clearhead.errors import InputError
from clearhead.kernels.positions import token_positions


@dataclass(frozen=True)
class Sequence:
    """The input of one stack. RoPE scaling that depends on the length reads the total one; None: that of the ids."""

    ids: Ids
    mask: Real | None = None  # None: all tokens are real
    segments: Ids | None = None
    positions: Ids | None = None  # in place of the count of real tokens
    documents: Ids | None = None  # their numbers; a token sees its own document only, and positions restart there
    embeddings: States | None = None  # in place of the rows that the ids name
    prefix: Real | None = None  # True = attentions with a prefix mask let every token attend to it
    total_length: int | Int[Tensor, " batch"] | None = None  # how many tokens each sequence will have in the end


@dataclass
class Context:
    """The context that the attentions of one call of a stack share."""

    masking: Masking
    query_position: Int[Tensor, "batch queries"]
    key_position: Int[Tensor, "batch keys"]
    memory: Memory | None = None
    memory_mask: RealMemory | None = None
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
        check_boolean("mask", sequence.mask)
        ids, mask, positions, documents = sequence.ids, sequence.mask, sequence.positions, sequence.documents
        keys, total_length = ids.shape[1], sequence.total_length
        if cache is not None:
            if documents is not None or positions is not None:
                raise InputError("a cache counts positions by itself; positions and documents cannot be given with it")
            if total_length is not None:
                raise InputError("the total length of a cached sequence belongs to its cache: Cache(total_length=...)")
            mask = cache.extend(ids, mask)
            keys, total_length = cache.length, cache.total_length
        if positions is None:
            positions = token_positions(mask, documents, keys, ids.device)
        first = keys - ids.shape[1]  # the tokens of this call are the last ones
        prefix = None if sequence.prefix is None else F.pad(sequence.prefix, (first, 0))
        masking = Masking(ids.shape[1], keys, mask, documents, prefix=prefix)
        return cls(masking, positions[:, first:], positions, memory, memory_mask, cache, total_length)

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """Return a value that several attentions share, made when the first one needs it."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]
