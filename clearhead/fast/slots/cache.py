"""KV cache of fixed size: rows begin in column 0, and the number of tokens of each row is a tensor on the device.

A row occupies a slot. Joining copies the keys of the row into a free slot, and leaving copies nothing. Shapes and
addresses stay the same from step to step, so a step can be recorded and replayed.

Legend: R rows, C columns (tokens), S source tokens, K key/value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from clearhead.core.context import Cache, Context, Masking
from clearhead.core.kernels.key_values import AllKeys, KeyValues, NewKeys
from clearhead.fast.cache import IndexedCache

RowIndices = Int[Tensor, " some_rows"]


class SlotKeys(KeyValues):
    """Keys and values of one attention, in the buffer of a `SlotCache`.

    Args:
        cache: the cache; its lengths say where the next key of each row goes.
        buffer: keys and values [2, rows, heads, columns, head_size].
        other: second buffer for beams, into which a step gathers the keys of each row's parent. None means one beam.
    """

    def __init__(self, cache: SlotCache, buffer: Tensor, other: Tensor | None = None) -> None:
        super().__init__()
        self.cache: SlotCache = cache
        self.buffer: Tensor | None = buffer
        self.other: Tensor | None = other

    def append(self, key_RKSE: NewKeys, value_RKSE: NewKeys) -> tuple[AllKeys, AllKeys]:
        """Write the key and value of each row's new token, and return views of the keys and values in use."""
        assert self.buffer is not None
        rows, keys = self.cache.num_rows, self.cache.num_keys
        buffer = self.buffer[:, :rows]
        if self.other is not None:
            buffer = self.other[:, :rows]
            held, parents_R = self.buffer[:, :rows, :, :keys], self.cache.parents_R[:rows]
            torch.index_select(held, 1, parents_R, out=buffer[:, :, :, :keys])
        column = self.cache.lengths_R[:rows, None, None, None].expand_as(key_RKSE)
        buffer[0].scatter_(2, column, key_RKSE)
        buffer[1].scatter_(2, column, value_RKSE)
        return buffer[0, :, :, :keys], buffer[1, :, :, :keys]


class SlotCache(Cache):
    """KV cache with a fixed number of slots and columns.

    A step uses the first `num_rows` slots, the first `num_keys` columns and the first `num_sources` source tokens: see
    `use`. Free slots compute on what they hold.

    Args:
        rows: number of slots.
        columns: maximum number of tokens of a row.
        sources: maximum number of source tokens of a row; 0 for a decoder-only model.
        like: a prefilled cache, whose shapes, dtype and device the buffers have.
        twins: attention of the tree that decodes, for each attention of the tree that prefilled `like`.
        beams: number of adjacent rows that are beams of one sentence and share its source.
    """

    num_rows: int
    num_keys: int
    num_sources: int
    memory_mask: Bool[Tensor, "sentences sources"] | None
    memory_attention: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]]

    def __init__(
        self,
        rows: int,
        columns: int,
        sources: int,
        like: IndexedCache,
        twins: Mapping[nn.Module, nn.Module],
        beams: int = 1,
    ) -> None:
        super().__init__()
        self.rows: int = rows
        self.columns: int = columns
        self.sources: int = sources
        self.beams: int = beams
        self.turn: int = 0
        """Number of the buffer that a step reads: 0, or 1 after every other step of beams."""
        self._twins = twins
        device = like.device
        self.lengths_R: Int[Tensor, " rows"] = torch.zeros(rows, dtype=torch.int64, device=device)
        self.index_1C: Int[Tensor, "1 columns"] = torch.arange(columns, device=device)[None]
        self.parents_R: Int[Tensor, " rows"] = torch.arange(rows, device=device)
        """The row whose keys each beam continues in the next step."""
        self.tables: dict[object, Tensor] = {}  # constants by position, computed in the first step
        for (attention, depth), entry in like.self_attention.items():
            assert entry.buffer is not None
            two, _, heads, _, size = entry.buffer.shape
            buffer = entry.buffer.new_zeros(two, rows, heads, columns, size)
            other = torch.zeros_like(buffer) if beams > 1 else None
            self.self_attention[twins[attention], depth] = SlotKeys(self, buffer, other)
            self.dtype: torch.dtype = buffer.dtype
        self._memories: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]] = {}
        self._memory_mask_RS = torch.zeros(rows // beams, sources, dtype=torch.bool, device=device)
        self._memory_mask_RS[:, :1] = True  # a row without a key would have weights that are not numbers
        for (attention, depth), (key, value) in like.memory_attention.items():
            shape = (rows // beams, key.shape[1], sources, key.shape[3])
            self._memories[twins[attention], depth] = key.new_zeros(shape), value.new_zeros(shape)
        self.use(rows, columns, sources)

    def use(self, rows: int, keys: int, sources: int) -> None:
        """Set the numbers of slots, columns and source tokens that the next steps read."""
        self.num_rows, self.num_keys, self.num_sources = rows, keys, sources
        sentences = rows // self.beams
        if self._memories:
            self.memory_mask = self._memory_mask_RS[:sentences, :sources]
        self.memory_attention = {
            owner: (key[:sentences, :, :sources], value[:sentences, :, :sources])
            for owner, (key, value) in self._memories.items()
        }

    def context(self, memory: Tensor | None, memory_mask: Tensor | None) -> Context:
        """Return the context of a step that reads one new token in each row."""
        length_R1 = self.lengths_R[: self.num_rows, None]
        index_1S = self.index_1C[:, : self.num_keys]
        masking = Masking(1, self.num_keys, index_1S <= length_R1)
        return Context(masking, length_R1, index_1S.expand(self.num_rows, -1), memory, memory_mask, self)

    def advance(self) -> None:
        """Count the tokens that a step has read; the count of a free slot stays below the number of columns."""
        self.lengths_R[: self.num_rows].add_(1).clamp_(max=self.columns - 1)

    def take_turns(self) -> None:
        """Let the next step of beams read the buffers that the last one has written."""
        if self.beams > 1:
            self.turn = 1 - self.turn
            for entry in self.self_attention.values():
                assert isinstance(entry, SlotKeys)
                entry.buffer, entry.other = entry.other, entry.buffer

    def put(self, read: IndexedCache, slots: RowIndices, lengths: RowIndices, longest: int) -> None:
        """Copy the rows of a prefilled cache, which end together, into slots.

        Args:
            read: the prefilled cache.
            slots: the slot of each row.
            lengths: number of tokens of each row.
            longest: the largest of `lengths`.
        """
        read.gather()
        column_RS = (self.index_1C[:, :longest] + (read.length - lengths)[:, None]).clamp_(max=read.length - 1)
        for (attention, depth), entry in read.self_attention.items():
            buffer = self.self_attention[self._twins[attention], depth].buffer
            assert entry.buffer is not None and buffer is not None
            held = entry.buffer[:, : len(slots), :, : read.length]
            column = column_RS[None, :, None, :, None].expand(2, -1, held.shape[2], -1, held.shape[4])
            buffer[:, slots, :, :longest] = held.gather(3, column).to(buffer.dtype)
        self.lengths_R[slots] = lengths
        if self._memories:
            slots, mask = slots[:: self.beams] // self.beams, read.memory_masks
            count = min(mask.shape[1], self.sources)
            self._memory_mask_RS[slots] = False
            self._memory_mask_RS[slots, :count] = mask[:, :count]
            for (attention, depth), pair in read.memory_attention.items():
                for buffer, states in zip(self._memories[self._twins[attention], depth], pair, strict=True):
                    buffer[slots, :, :count] = states[:, :, :count].to(buffer.dtype)

    def copy(self, slot: int, length: int, num_source: int) -> IndexedCache:
        """Return a cache of the prefilling tree with a copy of one row, its tokens and its source tokens."""
        copied, originals = IndexedCache(), {twin: module for module, twin in self._twins.items()}
        copied.length = length
        for (attention, depth), entry in self.self_attention.items():
            assert entry.buffer is not None
            keys = copied.self_attention[originals[attention], depth]
            keys.length, keys.buffer = length, entry.buffer[:, slot : slot + 1, :, :length].clone()
        for (attention, depth), (key, value) in self._memories.items():
            pair = (key[slot : slot + 1, :, :num_source].clone(), value[slot : slot + 1, :, :num_source].clone())
            copied.memory_attention[originals[attention], depth] = pair
            copied.memory_mask = self._memory_mask_RS[slot : slot + 1, :num_source].clone()
        return copied

    def move(self, slots: RowIndices) -> None:
        """Move the rows of these slots into the first slots, in this order."""
        count = len(slots)
        for entry in self.self_attention.values():
            assert entry.buffer is not None
            entry.buffer[:, :count, :, : self.num_keys] = entry.buffer[:, slots, :, : self.num_keys]
        self.lengths_R[:count] = self.lengths_R[slots]
        sentences = slots[:: self.beams] // self.beams
        for states in (*chain.from_iterable(self._memories.values()), self._memory_mask_RS):
            states[: len(sentences)] = states[sentences]
