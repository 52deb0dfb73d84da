"""KV cache that reorders its rows without moving keys and values. Legend: R rows, S keys, N sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.core import Cache
from clearhead.core.kernels.key_values import KeyValues
from clearhead.fast.native.abi import Keys
from clearhead.fast.stored import LARGEST

TINY: Final = torch.finfo(torch.float32).tiny
SPARE_KEYS: Final = 64
"""Free columns after the keys of concatenated caches, so that the buffer need not grow at once."""


class IndexedCache(Cache):
    """KV cache for the compiled layers: reordering rows and dropping sentences changes only an index.

    Row r writes its new keys into row r of the buffers. `row_index` holds the buffer rows of its older keys. Attention
    modules that read whole buffers need the rows in order; `gather` moves them there.
    """

    def __init__(self, total_length: int | Int[Tensor, " rows"] | None = None) -> None:
        super().__init__(total_length)
        self.is_by_index: bool = False  # True if the compiled layers use the index
        self.row_index: Int[Tensor, "rows keys"] | None = None  # int32; None: each row reads its own
        self.memory_row_index: Int[Tensor, " sentences"] | None = None  # int32; None: each sentence reads its own
        self.keys: dict[object, list[Keys]] = {}  # kernel arguments, by stack plan
        # Scales for 8-bit keys and values: one number for each vector, which its integers are multiplied by.
        self.scales: defaultdict[tuple[nn.Module, int], KeyValues] = defaultdict(KeyValues)

    def select(self, rows: Int[Tensor, " new_rows"], memory_rows: Int[Tensor, " new_sentences"] | None = None) -> None:
        """Reorder, drop or repeat rows and sentences; moves data only if there are more rows than the buffers have."""
        if not self.is_by_index or len(rows) > self.buffer_rows(0):
            self.gather()
            super().select(rows, memory_rows)
            for entry in self.scales.values():
                entry.select(rows)
            return
        self.row_index = rows.int()[:, None].expand(-1, self.length) if self.row_index is None else self.row_index[rows]
        if memory_rows is not None and self.memory_attention:
            before = self.memory_row_index
            self.memory_row_index = memory_rows.int() if before is None else before[memory_rows]
        # Masks and lengths are always stored in the order of the rows.
        keys, memories = self.self_attention, self.memory_attention
        self.self_attention: defaultdict[tuple[nn.Module, int], KeyValues] = defaultdict(KeyValues)
        self.memory_attention: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]] = {}
        super().select(rows, memory_rows)
        self.self_attention, self.memory_attention = keys, memories

    def extend_row_index(self, rows: int) -> Int[Tensor, "rows keys"] | None:
        """Add the key of the newest token to the index and return the index."""
        if self.row_index is not None and self.row_index.shape[1] < self.length:
            row_R1 = torch.arange(rows, dtype=torch.int32)[:, None]
            self.row_index = torch.cat([self.row_index, row_R1.expand(-1, self.length - self.row_index.shape[1])], 1)
        return self.row_index

    def gather(self) -> None:
        """Move the keys and values of each row and sentence into its own row of the buffers."""
        self.is_by_index = False
        if self.row_index is not None:
            row_index_RS, self.row_index = self.row_index.long(), None
            flat_indices: dict[tuple[int, ...], Tensor] = {}  # layers of one shape share the indices
            for entry in (*self.self_attention.values(), *self.scales.values()):
                assert entry.buffer is not None
                shape = tuple(entry.buffer.shape[:4])
                if shape not in flat_indices:
                    flat_indices[shape] = _flat_indices(shape, row_index_RS)
                gathered = entry.buffer.reshape(-1, entry.buffer.shape[4]).index_select(
                    0, flat_indices[shape].flatten()
                )
                entry.buffer = gathered.view(*flat_indices[shape].shape, -1)
        if self.memory_row_index is not None:
            rows, self.memory_row_index = self.memory_row_index.long(), None
            for layer, (key, value) in self.memory_attention.items():
                self.memory_attention[layer] = (key[rows], value[rows])

    def convert(self, dtype: torch.dtype) -> None:
        """Convert the stored keys and values to a dtype; those of an encoder memory stay at 16 bits at least.

        In 8 bits, each key and each value of a head has its own scale.
        """
        for layer, entry in self.self_attention.items():
            assert entry.buffer is not None
            if entry.buffer.dtype == dtype:
                continue
            if layer in self.scales:
                scale = self.scales.pop(layer).buffer
                assert scale is not None
                entry.buffer = entry.buffer * scale
            if dtype == torch.int8:
                scales = self.scales[layer]
                scales.length, scales.buffer = entry.length, entry.buffer.float().abs().amax(-1, True) / LARGEST
                # A vector of zeros has no scale; its integers are zeros.
                entry.buffer = (entry.buffer / scales.buffer.clamp(min=TINY)).round()
            entry.buffer = entry.buffer.to(dtype)
        memory_dtype = torch.bfloat16 if dtype == torch.int8 else dtype
        for layer, (key, value) in self.memory_attention.items():
            self.memory_attention[layer] = (key.to(memory_dtype), value.to(memory_dtype))

    @property
    def device(self) -> torch.device:
        """Device of the keys and values."""
        buffer = next(iter(self.self_attention.values())).buffer
        assert buffer is not None
        return buffer.device

    @property
    def num_rows(self) -> int:
        """Number of rows; call `gather` first if rows are out of order."""
        assert not self.is_by_index, "call gather first: the rows are out of order"
        return self.buffer_rows(0)

    @property
    def padding(self) -> int:
        """Number of padding keys before the first token of all rows."""
        return 0 if self.mask is None else int(self.mask.any(dim=0).int().argmax())

    @property
    def memory_masks(self) -> Bool[Tensor, "sentences keys"]:
        """Mask of the real keys of the encoder memory."""
        if self.memory_mask is not None:
            return self.memory_mask
        key, _ = next(iter(self.memory_attention.values()))
        return torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)

    @property
    def source_length(self) -> int:
        """Number of keys of the encoder memory, with padding; 0 for a decoder-only model."""
        return max((key.shape[2] for key, _ in self.memory_attention.values()), default=0)

    @property
    def is_separable(self) -> bool:
        """True if single rows can be removed with their keys: the cache has keys and no state of custom modules."""
        return not self.states and bool(self.self_attention)

    @property
    def row_lengths(self) -> list[int]:
        """Number of tokens of each row, without padding."""
        return [self.length] * self.buffer_rows(0) if self.mask is None else self.mask.sum(1).tolist()

    def buffer_rows(self, rows: int) -> int:
        """Return the number of rows of the key and value buffers, or `rows` if no buffer exists yet."""
        buffer = next((entry.buffer for entry in self.self_attention.values()), None)
        return rows if buffer is None else buffer.shape[1]


def split_rows(cache: IndexedCache, lengths: Sequence[int], source_lengths: Sequence[int] | None) -> list[IndexedCache]:
    """Return one cache for each row of a cache whose rows end together, with views of its keys and values.

    Args:
        cache: cache with a row for each sentence and without state of custom modules. It must not be used afterwards.
        lengths: number of real keys at the end of each row.
        source_lengths: number of real keys at the start of each encoder memory. None means no encoder memory.
    """
    cache.gather()
    return [
        _view_row(cache, row, length, None if source_lengths is None else source_lengths[row])
        for row, length in enumerate(lengths)
    ]


def copy_row(cache: IndexedCache, row: int) -> IndexedCache:
    """Return a cache with a copy of the keys and values of one row, without padding.

    Args:
        cache: a separable cache with a row for each sentence.
        row: the index of the row.
    """
    cache.gather()
    source_length = int(cache.memory_masks[row].sum()) if cache.memory_attention else None
    copy = _view_row(cache, row, cache.row_lengths[row], source_length)
    for entry in (*copy.self_attention.values(), *copy.scales.values()):
        assert entry.buffer is not None
        entry.buffer = entry.buffer.clone()
    return copy


def _view_row(cache: IndexedCache, row: int, length: int, source_length: int | None) -> IndexedCache:
    """Return a cache of one row with views of its last `length` keys and its first `source_length` source keys."""
    row_slice, total = slice(row, row + 1), cache.total_length
    view = IndexedCache(total[row_slice] if isinstance(total, Tensor) else total)
    view.length = length
    for name in ("self_attention", "scales"):
        for address, entry in getattr(cache, name).items():
            copied = getattr(view, name)[address]
            copied.length, copied.buffer = length, entry.buffer[:, row_slice, :, entry.length - length : entry.length]
    if source_length is not None:
        view.memory_mask = cache.memory_masks[row_slice, :source_length]
        for address, (key, value) in cache.memory_attention.items():
            view.memory_attention[address] = (key[row_slice, :, :source_length], value[row_slice, :, :source_length])
    return view


def _flat_indices(shape: tuple[int, ...], row_index_RS: Int[Tensor, "rows keys"]) -> Int[Tensor, "2 rows heads keys"]:
    """Return the flat indices of the keys and values of each row in a buffer [2, rows, heads, capacity]."""
    _, rows, heads, capacity = shape
    two, head = torch.arange(2)[:, None, None, None], torch.arange(heads)[:, None]
    key = torch.arange(row_index_RS.shape[1])
    return ((two * rows + row_index_RS[:, None]) * heads + head) * capacity + key


def concat_caches(caches: Sequence[Cache]) -> IndexedCache:
    """Concatenate the rows of several caches, aligned at their newest keys; the caches must not be used again.

    Padding before the first token of all rows is dropped. The rest is masked: before the tokens of a row and after the
    keys of an encoder memory. Keys and values have the dtype of the first cache.

    Args:
        caches: caches of one model that already hold keys and values of their rows.
    """
    indexed = [cache for cache in caches if isinstance(cache, IndexedCache)]
    assert len(indexed) == len(caches), "only indexed caches can be concatenated"
    return _concat_indexed(indexed)


def _concat_indexed(caches: Sequence[IndexedCache]) -> IndexedCache:
    first = caches[0]
    for cache in caches:
        cache.gather()
    first_buffer = next(iter(first.self_attention.values())).buffer
    assert first_buffer is not None
    for cache in caches:
        cache.convert(first_buffer.dtype)
    result = IndexedCache(_concat_lengths(caches))
    result.length = max(cache.length - cache.padding for cache in caches)
    result.mask = _concat_masks(caches, result.length)
    for name in ("self_attention", "scales"):
        for layer in getattr(first, name):
            entries = [getattr(cache, name)[layer] for cache in caches]
            getattr(result, name)[layer] = _concat_keys(entries, result.length)
    if first.memory_attention:
        _join_memories(result, caches)
    return result


def _join_memories(result: IndexedCache, caches: Sequence[IndexedCache]) -> None:
    masks = [cache.memory_masks for cache in caches]
    longest = max(mask.shape[1] for mask in masks)
    result.memory_mask = torch.cat([F.pad(mask, (0, longest - mask.shape[1])) for mask in masks])
    for layer in caches[0].memory_attention:
        keys, values = [], []
        for cache in caches:
            key, value = cache.memory_attention[layer]
            keys.append(_pad_keys(key, longest))
            values.append(_pad_keys(value, longest))
        result.memory_attention[layer] = (torch.cat(keys), torch.cat(values))


def _concat_lengths(caches: Sequence[IndexedCache]) -> Int[Tensor, " rows"] | None:
    lengths = []
    for cache in caches:
        if cache.total_length is None:
            return None
        lengths.append(torch.as_tensor(cache.total_length, device=cache.device).expand(cache.num_rows))
    return torch.cat(lengths)


def _concat_masks(caches: Sequence[IndexedCache], length: int) -> Bool[Tensor, "rows keys"] | None:
    """Return the mask of real keys in the concatenated cache; None if all keys are real."""
    masks = []
    for cache in caches:
        mask = cache.mask
        if mask is None:
            mask = torch.ones(cache.num_rows, cache.length, dtype=torch.bool, device=cache.device)
        masks.append(F.pad(mask, (length - cache.length, 0)))
    whole = torch.cat(masks)
    return None if bool(whole.all()) else whole


def _concat_keys(entries: Sequence[KeyValues], length: int) -> KeyValues:
    buffers = [entry.buffer for entry in entries if entry.buffer is not None]
    _, _, heads, _, size = buffers[0].shape
    rows = sum(buffer.shape[1] for buffer in buffers)
    result, start = KeyValues(), 0
    result.length, result.buffer = length, buffers[0].new_zeros(2, rows, heads, length + SPARE_KEYS, size)
    for entry, buffer in zip(entries, buffers, strict=True):
        copied, stop = min(entry.length, length), start + buffer.shape[1]
        result.buffer[:, start:stop, :, length - copied : length] = buffer[
            :, :, :, entry.length - copied : entry.length
        ]
        start = stop
    return result


def _pad_keys(x_NKSE: Tensor, length: int) -> Tensor:
    return F.pad(x_NKSE, (0, 0, 0, length - x_NKSE.shape[2]))
