"""What kernels are told about keys and values, for each attention of a call.

Legend: G groups of rows with the same keys, S keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from jaxtyping import Float, Num
from torch import Tensor

from clearhead import spec
from clearhead.core.attention import Attention, MemoryAttention
from clearhead.core.context import Context
from clearhead.fast.native.abi import Keys, values
from clearhead.fast.native.addresses import address
from clearhead.fast.pieces import NewTokens, Piece

EVERYWHERE: Final = 2**40
Heads = Num[Tensor, "rows heads keys head_size"]
KEY_KINDS: Final = [getattr(torch, name) for name in values("KeyKind")]


def new_tokens(context: Context, batch: int) -> NewTokens:
    """Return the new tokens of a call, found once."""
    if "new tokens" not in context.shared:
        context.shared["new tokens"] = NewTokens.of(context.masking, batch)
    tokens: NewTokens = context.shared["new tokens"]
    return tokens


def set_groups(keys: Keys, piece: Piece, first_keys: Tensor | None) -> None:
    """Set which rows have the same keys, and where these begin."""
    keys.groups, keys.rows_per_group, keys.cu_seqlens, keys.first_keys = piece.count, 1, None, None
    if piece.cu_seqlens is not None:
        keys.held.append(piece.cu_seqlens)
        keys.cu_seqlens = address(piece.cu_seqlens, torch.int64, piece.count + 1)
    if first_keys is not None:
        keys.held.append(some := first_keys[piece.rows].contiguous())
        keys.first_keys = address(some, torch.int64, piece.count)


def set_memory(
    keys: Keys, piece: Piece, batch: int, row_index: Tensor | None, attention: MemoryAttention, context: Context
) -> None:
    """Set the keys of a memory, and which rows read a sentence: all beams of it, or of several tokens those of one."""
    (key, value), mask_NS = attention.remembered(context), context.memory_mask
    made_of = key, value, mask_NS, row_index, piece.cu_seqlens, piece.count, batch
    if keys.is_made_of(made_of):
        return
    keys.held = []
    keys.window_before = keys.window_after = EVERYWHERE
    keys.row_index = None
    sentences = len(key) if row_index is None else len(row_index)
    set_groups(keys, piece, None)
    keys.count = key.shape[2]
    if piece.cu_seqlens is None:
        keys.groups, keys.rows_per_group = sentences, batch // sentences
    else:
        of_rows = torch.arange(piece.rows.start, piece.rows.stop) // (batch // sentences)
        row_index = of_rows.int() if row_index is None else row_index[of_rows]
        mask_NS = None if mask_NS is None else mask_NS[of_rows]
    if row_index is not None:
        keys.held.append(row_index)
        keys.row_index, keys.row_index_stride = address(row_index, torch.int32, keys.groups), 0
    set_mask(keys, mask_NS)
    _set_places(keys, attention.spec, key, value)
    keys.made_of = made_of  # without a cache nothing else holds the keys and values


def sight(mask: spec.Mask) -> tuple[int, int]:
    """Return how many keys before and behind its own place a row sees."""
    if isinstance(mask, spec.Window):
        return mask.before, mask.after
    return EVERYWHERE, EVERYWHERE if isinstance(mask, spec.Full) else 0


def set_bias(keys: Keys, attention: Attention, rows: int, context: Context) -> None:
    """Set the bias on the scores of one new token of each row, which depends on positions alone."""
    choice = attention.spec
    if choice.score_bias is not None:
        key_BKSE = torch.empty(rows, choice.num_kv_heads, keys.count, choice.head_size)
        bias = attention.bias(torch.empty(rows, choice.num_heads, 1, choice.head_size), key_BKSE, context)
        assert bias is not None
        bias_BHS = bias[:, :, 0].float().contiguous()
        keys.held.append(bias_BHS)
        shape = rows, choice.num_heads, keys.count
        keys.bias = address(bias_BHS.expand(shape), torch.float32, *shape, by_row=True)
        keys.bias_head_stride = bias_BHS.stride(1) if bias_BHS.shape[1] > 1 else 0
        keys.bias_row_stride = bias_BHS.stride(0) if len(bias_BHS) > 1 else 0
        keys.is_bias_by_place = False


def set_bias_by_place(keys: Keys, attention: Attention, context: Context) -> None:
    """Set the bias on the scores of texts, which depends on places in the own text alone: one for all texts."""
    if attention.spec.score_bias is not None:
        shape = 1, attention.spec.num_heads, keys.count, keys.count
        if (name := ("by place", keys.count)) not in context.shared:
            context.shared[name] = _by_place(context, keys.count)
        by_place = context.shared[name]
        nothing = torch.empty(*shape[:3], 0)
        bias = attention.bias(nothing, nothing, by_place)
        assert bias is not None
        keys.held.append(bias_1HSS := bias.float().contiguous())
        keys.bias, keys.is_bias_by_place = address(bias_1HSS, torch.float32, *shape), True
        keys.bias_head_stride, keys.bias_row_stride = bias_1HSS.stride()[1:3]


def _by_place(context: Context, count: int) -> Context:
    places = torch.arange(count)[None]
    return replace(context, query_position=places, key_position=places, masks={}, shared={})


def set_buffers(keys: Keys, choice: spec.Attention, first: int, buffer: Tensor, scales: Tensor | None = None) -> None:
    """Set where keys and values of the rows from the first one on lie, unless they lay there in the last step."""
    if keys.is_made_of(made_of := (first, buffer, scales)):
        return
    key, value = buffer[:, first:]
    _set_places(keys, choice, key, value)
    if scales is not None:
        # As many rows, heads and keys.
        assert [size * key.shape[3] for size in scales.stride()[1:4]] == [*key.stride()[:3]]
        keys.key_scales, keys.value_scales = (
            address(one, torch.float32, *key.shape[:3], 1, by_row=True) for one in scales[:, first:]
        )
    keys.made_of = made_of


def _set_places(keys: Keys, choice: spec.Attention, key: Heads, value: Heads) -> None:
    assert key.stride() == value.stride() and key.shape[2] >= keys.count and key.dtype in KEY_KINDS
    shape = len(key), choice.num_kv_heads, key.shape[2], choice.head_size
    keys.key, keys.value = (address(one, key.dtype, *shape, by_row=True) for one in (key, value))
    keys.row_stride, keys.head_stride, keys.key_stride, _ = key.stride()
    keys.kind = KEY_KINDS.index(key.dtype)


def set_mask(keys: Keys, mask_GS: Tensor | None) -> None:
    """Set which keys each group of rows may attend to."""
    keys.mask = None
    if mask_GS is not None:
        keys.held.append(mask_GS := mask_GS.contiguous())
        assert mask_GS.shape[1] >= keys.count
        keys.mask_stride = mask_GS.stride(0) if len(mask_GS) > 1 else 0
        keys.mask = address(mask_GS, torch.bool, len(mask_GS), mask_GS.shape[1])


def set_angles(keys: Keys, attention: Attention, piece: Piece, batch: int, context: Context) -> None:
    """Set cosines and sines for the tokens of a piece, where queries and keys are rotated."""
    rotary = attention.spec.position
    if rotary is None:
        return

    def of_rows(angle_B1TE: Tensor) -> Float[Tensor, "rows half"]:
        return angle_B1TE[:, 0].float().expand(batch, -1, -1).flatten(0, 1).contiguous()

    if (name := ("angles by row", attention.rotation_number)) not in context.shared:
        context.shared[name] = [of_rows(angle) for angle in attention.angles(rotary, context)]
    cos, sin = (angle_ME[piece.places] for angle_ME in context.shared[name])
    keys.held += [cos, sin]
    keys.cos, keys.sin = (address(one, torch.float32, *cos.shape) for one in (cos, sin))
    keys.half, keys.angle_stride = cos.shape[1], cos.stride(0)
