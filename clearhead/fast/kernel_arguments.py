"""Kernel arguments of attention: new tokens in chunks without padding, and the keys and values of each layer.

Several texts share a chunk, or one text is cut into chunks at fixed distances from its start. So the result for a text
does not depend on the other texts of its batch.

Legend: B batch, T new tokens of a row with its padding, S keys, M computed rows, G groups of rows with equal keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from clearhead import spec
from clearhead.core.attention import Attention, MemoryAttention
from clearhead.core.context import Context, Masking
from clearhead.fast.native.abi import Keys, address, values

CHUNK_TOKENS: Final = 2048
"""Tokens that run through all layers before the next tokens do, so that their activations stay small."""
TokenIndices = slice | Int[Tensor, " rows"]


@dataclass(frozen=True)
class PromptChunk:
    """New tokens of a batch that run through all layers in one kernel call.

    Args:
        rows: slice of the batch rows.
        token_indices: indices of the tokens in the flattened batch.
        cu_seqlens: int64, index of the first token of each row, then the total. None means one token per row.
        remaining: number of new tokens after this chunk in a row that is cut into chunks.
    """

    rows: slice
    token_indices: TokenIndices
    cu_seqlens: Int[Tensor, " ends"] | None
    remaining: int = 0

    @property
    def count(self) -> int:
        """Number of rows."""
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True)
class NewTokens:
    """New tokens of a batch that one forward pass reads, with the padding around them.

    Args:
        batch, length: size of the batch, and its number of new tokens per row with padding.
        first_keys: int64, index of the first key of each row after its padding. None means no padding in front.
        mask: mask of the real keys, if padding is not only in front; padding tokens are then computed like others.
    """

    batch: int
    length: int
    first_keys: Int[Tensor, " batch"] | None
    mask: Bool[Tensor, "batch keys"] | None

    @classmethod
    def of(cls, masking: Masking, batch: int) -> NewTokens:
        """Return the new tokens and the padding that the masks of a forward pass describe."""
        mask_BS = masking.key_mask
        if mask_BS is None:
            return cls(batch, masking.num_queries, None, None)
        first_keys_B = mask_BS.byte().argmax(1)
        is_in_front = bool((mask_BS.sum(1) + first_keys_B == mask_BS.shape[1]).all())
        return cls(batch, masking.num_queries, *((first_keys_B, None) if is_in_front else (None, mask_BS)))

    def chunks(self, num_keys: int) -> Iterator[PromptChunk]:
        """Yield the chunks of the new tokens, those of one row in order; `num_keys` includes padding and new tokens."""
        if self.length == 1:
            yield PromptChunk(slice(0, self.batch), slice(None), None)
            return
        padding = [0] * self.batch
        if self.first_keys is not None:
            padding = (self.first_keys - (num_keys - self.length)).clamp(min=0).tolist()
        row = 0
        while row < self.batch:
            ends = list(accumulate(self.length - left for left in padding[row:]))
            count = max(1, sum(end <= CHUNK_TOKENS for end in ends))
            for token in range(0, ends[count - 1], CHUNK_TOKENS):
                yield self._chunk(row, count, padding, token)
            row += count

    def _chunk(self, row: int, count: int, padding: list[int], token: int) -> PromptChunk:
        """Return a chunk of whole rows, or of the tokens of a single row from the given token on."""
        first, last = padding[row] + token, self.length
        if count == 1:
            last = min(last, first + CHUNK_TOKENS)
            begin = row * self.length
            cu_seqlens = torch.tensor([0, last - first])
            return PromptChunk(slice(row, row + 1), slice(begin + first, begin + last), cu_seqlens, self.length - last)
        row_padding = padding[row : row + count]
        cu_seqlens = torch.tensor([0, *accumulate(self.length - left for left in row_padding)])
        token_indices: TokenIndices = slice(row * self.length, (row + count) * self.length)
        if any(row_padding):
            tokens_NT = torch.arange(row * self.length, (row + count) * self.length).view(count, -1)
            token_indices = tokens_NT[torch.arange(self.length) >= torch.tensor(row_padding)[:, None]]
        return PromptChunk(slice(row, row + count), token_indices, cu_seqlens)


EVERYWHERE: Final = 2**40
Heads = Num[Tensor, "rows heads keys head_size"]
KEY_KINDS: Final = [getattr(torch, name) for name in values("KeyKind")]


def new_tokens(context: Context, batch: int) -> NewTokens:
    """Return the new tokens that a forward pass reads, computed once per pass."""
    if "new tokens" not in context.shared:
        context.shared["new tokens"] = NewTokens.of(context.masking, batch)
    tokens: NewTokens = context.shared["new tokens"]
    return tokens


def set_groups(keys: Keys, chunk: PromptChunk, first_keys: Tensor | None) -> None:
    """Write the groups of tokens that share keys (one per row) and the first key of each row into the arguments."""
    keys.groups, keys.rows_per_group, keys.cu_seqlens, keys.first_keys = chunk.count, 1, None, None
    if chunk.cu_seqlens is not None:
        keys.tensors.append(chunk.cu_seqlens)
        keys.cu_seqlens = address(chunk.cu_seqlens, torch.int64, chunk.count + 1)
    if first_keys is not None:
        keys.tensors.append(chunk_first_keys := first_keys[chunk.rows].contiguous())
        keys.first_keys = address(chunk_first_keys, torch.int64, chunk.count)


def set_memory(
    keys: Keys, chunk: PromptChunk, batch: int, row_index: Tensor | None, attention: MemoryAttention, context: Context
) -> None:
    """Write keys of an encoder memory and their groups into the arguments: beams of a sentence, or tokens of a row."""
    (key, value), mask_NS = attention.memory_keys_values(context), context.memory_mask
    sources = key, value, mask_NS, row_index, chunk.cu_seqlens, chunk.count, batch
    if keys.is_made_from(sources):
        return
    keys.tensors = []
    keys.window_before = keys.window_after = EVERYWHERE
    keys.row_index = None
    sentences = len(key) if row_index is None else len(row_index)
    set_groups(keys, chunk, None)
    keys.count = key.shape[2]
    if chunk.cu_seqlens is None:
        keys.groups, keys.rows_per_group = sentences, batch // sentences
    else:
        sentence_of_row = torch.arange(chunk.rows.start, chunk.rows.stop) // (batch // sentences)
        row_index = sentence_of_row.int() if row_index is None else row_index[sentence_of_row]
        mask_NS = None if mask_NS is None else mask_NS[sentence_of_row]
    if row_index is not None:
        keys.tensors.append(row_index)
        keys.row_index, keys.row_index_stride = address(row_index, torch.int32, keys.groups), 0
    set_mask(keys, mask_NS)
    _set_key_addresses(keys, attention.spec, key, value)
    keys.sources = sources  # without a cache, only this reference keeps the keys and values alive


def window_bounds(mask: spec.Mask) -> tuple[int, int]:
    """Return the numbers of keys before and after its own position that a query may attend to."""
    if isinstance(mask, spec.Window):
        return mask.before, mask.after
    return EVERYWHERE, EVERYWHERE if isinstance(mask, spec.Full) else 0


def set_bias(keys: Keys, attention: Attention, rows: int, context: Context) -> None:
    """Write the bias on the scores of one new token per row into the arguments; it depends on positions alone."""
    choice = attention.spec
    if choice.score_bias is not None:
        key_BKSE = torch.empty(rows, choice.num_kv_heads, keys.count, choice.head_size)
        bias = attention.bias(torch.empty(rows, choice.num_heads, 1, choice.head_size), key_BKSE, context)
        assert bias is not None
        bias_BHS = bias[:, :, 0].float().contiguous()
        keys.tensors.append(bias_BHS)
        shape = rows, choice.num_heads, keys.count
        keys.bias = address(bias_BHS.expand(shape), torch.float32, *shape, by_row=True)
        keys.bias_head_stride = bias_BHS.stride(1) if bias_BHS.shape[1] > 1 else 0
        keys.bias_row_stride = bias_BHS.stride(0) if len(bias_BHS) > 1 else 0
        keys.is_bias_by_place = False


def set_bias_by_place(keys: Keys, attention: Attention, context: Context) -> None:
    """Write the bias on the scores of whole texts into the arguments; all texts share one bias."""
    if attention.spec.score_bias is not None:
        shape = 1, attention.spec.num_heads, keys.count, keys.count
        if (name := ("by place", keys.count)) not in context.shared:
            context.shared[name] = _position_context(context, keys.count)
        by_place = context.shared[name]
        nothing = torch.empty(*shape[:3], 0)
        bias = attention.bias(nothing, nothing, by_place)
        assert bias is not None
        keys.tensors.append(bias_1HSS := bias.float().contiguous())
        keys.bias, keys.is_bias_by_place = address(bias_1HSS, torch.float32, *shape), True
        keys.bias_head_stride, keys.bias_row_stride = bias_1HSS.stride()[1:3]


def _position_context(context: Context, count: int) -> Context:
    places = torch.arange(count)[None]
    return replace(context, query_position=places, key_position=places, masks={}, shared={})


def set_buffers(keys: Keys, choice: spec.Attention, first: int, buffer: Tensor, scales: Tensor | None = None) -> None:
    """Write the buffer addresses of keys and values into the arguments, if they changed; the rows begin at `first`."""
    if keys.is_made_from(sources := (first, buffer, scales)):
        return
    key, value = buffer[:, first:]
    _set_key_addresses(keys, choice, key, value)
    if scales is not None:
        # The scales have the same numbers of rows, heads and keys.
        assert [size * key.shape[3] for size in scales.stride()[1:4]] == [*key.stride()[:3]]
        keys.key_scales, keys.value_scales = (
            address(scale, torch.float32, *key.shape[:3], 1, by_row=True) for scale in scales[:, first:]
        )
    keys.sources = sources


def _set_key_addresses(keys: Keys, choice: spec.Attention, key: Heads, value: Heads) -> None:
    assert key.stride() == value.stride() and key.shape[2] >= keys.count and key.dtype in KEY_KINDS
    shape = len(key), choice.num_kv_heads, key.shape[2], choice.head_size
    keys.key, keys.value = (address(tensor, key.dtype, *shape, by_row=True) for tensor in (key, value))
    keys.row_stride, keys.head_stride, keys.key_stride, _ = key.stride()
    keys.kind = KEY_KINDS.index(key.dtype)


def set_mask(keys: Keys, mask_GS: Tensor | None) -> None:
    """Write the mask of the keys that each group of rows may attend to into the arguments."""
    keys.mask = None
    if mask_GS is not None:
        keys.tensors.append(mask_GS := mask_GS.contiguous())
        assert mask_GS.shape[1] >= keys.count
        keys.mask_stride = mask_GS.stride(0) if len(mask_GS) > 1 else 0
        keys.mask = address(mask_GS, torch.bool, len(mask_GS), mask_GS.shape[1])


def set_angles(keys: Keys, attention: Attention, chunk: PromptChunk, batch: int, context: Context) -> None:
    """Write the cosines and sines of RoPE for the tokens of a chunk into the arguments, if the attention uses it."""
    rotary = attention.spec.position
    if rotary is None:
        return

    def flatten_rows(angle_B1TE: Tensor) -> Float[Tensor, "rows half"]:
        return angle_B1TE[:, 0].float().expand(batch, -1, -1).flatten(0, 1).contiguous()

    if (name := ("angles by row", attention.rotation_number)) not in context.shared:
        context.shared[name] = [flatten_rows(angle) for angle in attention.angles(rotary, context)]
    cos, sin = (angle_ME[chunk.token_indices] for angle_ME in context.shared[name])
    keys.tensors += [cos, sin]
    keys.cos, keys.sin = (address(angle, torch.float32, *cos.shape) for angle in (cos, sin))
    keys.half, keys.angle_stride = cos.shape[1], cos.stride(0)
