"""The KV cache. Legend: R rows, M sentences, K key/value heads, S keys, E head size."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.core.shapes import Ids, Real

New = Float[Tensor, "rows heads new head_size"]
Kept = Float[Tensor, "rows heads keys head_size"]


class KeyValues:
    """The keys and values of one attention, in a buffer that doubles when it is full."""

    def __init__(self) -> None:
        self.length = 0
        self.buffer: Float[Tensor, "2 rows heads capacity head_size"] | None = None

    def append(self, key_RKSE: New, value_RKSE: New) -> tuple[Kept, Kept]:
        """Add the newest tokens and return views of all of them."""
        end = self.length + key_RKSE.shape[2]
        if self.buffer is None or end > self.buffer.shape[3]:
            rows, heads, _, size = key_RKSE.shape
            grown = key_RKSE.new_empty(2, rows, heads, max(16, 2 * end), size)
            if self.buffer is not None:
                grown[:, :, :, : self.length] = self.buffer[:, :, :, : self.length]
            self.buffer = grown
        self.buffer[0, :, :, self.length : end] = key_RKSE
        self.buffer[1, :, :, self.length : end] = value_RKSE
        self.length = end
        return self.buffer[0, :, :, :end], self.buffer[1, :, :, :end]

    def select(self, rows: Int[Tensor, " new_rows"]) -> None:
        if self.buffer is not None:
            self.buffer = self.buffer[:, rows, :, : self.length]


class Cache:
    """What a decoder keeps between calls; it grows by the tokens of each call.

    Keys and values of the memory are kept once for each sentence, however many rows (beams) decode it; the rows of a
    sentence lie side by side. A cache belongs to one sequence of calls of one model and holds no gradients.

    Args:
        total_length: how many tokens a sequence will have in the end, for all rows or for each; RoPE scaling that
            depends on the length needs it beyond its original length, for cached keys cannot be rotated again.
    """

    def __init__(self, total_length: int | Int[Tensor, " rows"] | None = None) -> None:
        self.total_length = total_length
        # By the attention and the depth it runs at: layers that share their weights still see different states.
        self.self_attention: dict[tuple[nn.Module, int], KeyValues] = {}
        self.memory_attention: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]] = {}
        self.length = 0
        self.mask: Bool[Tensor, "rows keys"] | None = None
        self.memory_mask: Bool[Tensor, "sentences keys"] | None = None

    def extend(self, ids: Ids, mask: Real | None) -> Bool[Tensor, "batch keys"] | None:
        """Count the tokens of a call and return the mask of all; called once, before the attentions."""
        if mask is not None or self.mask is not None:
            old = ids.new_ones(len(ids), self.length, dtype=torch.bool) if self.mask is None else self.mask
            new = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
            self.mask = torch.cat([old, new], dim=1)
        self.length += ids.shape[1]
        return self.mask

    def select(self, rows: Int[Tensor, " new_rows"], memory_rows: Int[Tensor, " new_sentences"] | None = None) -> None:
        """Reorder, drop or repeat rows, and sentences if given.

        Args:
            rows: for each new row, the old row it continues.
            memory_rows: for each new sentence, the old sentence; None: sentences stay as they are.
        """
        for entry in self.self_attention.values():
            entry.select(rows)
        if self.mask is not None:
            self.mask = self.mask[rows]
        if isinstance(self.total_length, Tensor):
            self.total_length = self.total_length[rows]
        if memory_rows is not None:
            for place, (key, value) in self.memory_attention.items():
                self.memory_attention[place] = (key[memory_rows], value[memory_rows])
            if self.memory_mask is not None:
                self.memory_mask = self.memory_mask[memory_rows]
