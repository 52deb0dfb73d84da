"""Attention maps of long texts: the page gets the masks at once, and requests tiles of each map.

Legend: Q queries, K keys, S side of a tile.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from itertools import chain
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float32
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from clearhead import spec
from clearhead.apps.serve.interventions import Data
from clearhead.base.errors import InputError
from clearhead.interpret.maps.attention_maps import AttentionMaps
from clearhead.interpret.maps.page import bias_name, mask_name, stack_attention, token_rows
from clearhead.interpret.maps.recording import STACKS, AttentionRecord
from clearhead.interpret.view.explorer.data import LayerAttention, Sample
from clearhead.interpret.view.explorer.encode import LARGEST, LEVELS

SIDE = 512  # rows and columns of a tile
MASKED = 0xFFFF
_MOST_SCORES = 2**20  # scores of one head that are computed together; they fit into the processor's cache


def is_long(maps: AttentionMaps, layers: int = 1) -> bool:
    """Return whether a run has too many attention weights for a page.

    Args:
        maps: the attention maps of the run.
        layers: the number of layers of the model for each recorded layer.
    """
    counts = (
        record.num_heads * record.query_BHTE.shape[2] * record.key_BKSE.shape[2] for record in maps.records.values()
    )
    return layers * sum(counts) // 2 > LARGEST


def long_sample(maps: AttentionMaps, label: str, check: Callable[[], None]) -> Sample:
    """Return a sample without weights, whose page requests tiles of its maps; its heads are not measured.

    Args:
        maps: the attention maps of the run.
        label: the name of the sample on the page.
        check: function that is called often; its error ends the computation.
    """
    known: dict[str, tuple[int, ...]] = {}
    layers: dict[str, list[LayerAttention]] = {}
    for record in maps.records.values():
        mask = mask_name(record)
        if f"{record.stack} {mask}" not in known:
            known[f"{record.stack} {mask}"] = _spans(record, check)
        layer = LayerAttention(
            layer=record.layer,
            heads=tuple(range(record.num_heads)),
            num_heads=record.num_heads,
            num_kv_heads=record.key_BKSE.shape[1],
            weights=None,
            mask=None,
            mask_name=mask,
            has_sink=record.attention.sink is not None,
            spans=known[f"{record.stack} {mask}"],
            score_bias=bias_name(record),
        )
        layers.setdefault(record.stack, []).append(layer)
    rows = token_rows(maps)
    return Sample(label, rows, tuple(stack_attention(name, layers[name], rows) for name in STACKS if name in layers))


def _spans(record: AttentionRecord, check: Callable[[], None]) -> tuple[int, ...]:
    """Return the numbers of the first and the last visible key of each query, as one flat tuple."""
    queries, keys = record.query_BHTE.shape[2], record.key_BKSE.shape[2]
    bounds: list[int] = []
    if record.attention.spec.mask == spec.Causal() and record.context.masking.is_only_causal(spec.Causal()):
        return tuple(chain.from_iterable((0, query) for query in range(queries)))
    size = max(1, _MOST_SCORES // keys)
    for start in range(0, queries, size):
        check()
        rows = slice(start, min(queries, start + size))
        mask = record.mask(rows)
        if mask is None:
            bounds += [0, keys - 1] * (rows.stop - rows.start)
            continue
        seen = mask[0, 0].expand(rows.stop - rows.start, keys).to(torch.uint8)
        first, last = seen.argmax(1), keys - 1 - seen.flip(1).argmax(1)
        is_empty = seen.amax(1) == 0
        pairs = torch.stack([first.masked_fill(is_empty, 0), last.masked_fill(is_empty, -1)], 1)
        bounds += pairs.flatten().tolist()
    return tuple(bounds)


class MapTile(Data):
    """Request for one tile of an attention map.

    Args:
        stack, layer, head: the attention head of the map.
        sample: the run; 0 is the unchanged one, 1 the edited one.
        pool: the number of queries, and of keys, whose largest weight makes one number of the tile.
        row, column: the row and the column of the tile, in tiles of this pool.
    """

    stack: str
    layer: Annotated[int, Field(ge=0)]
    head: Annotated[int, Field(ge=0)]
    sample: Annotated[int, Field(ge=0, le=1)] = 0
    pool: Annotated[int, Field(ge=1, le=4096)] = 1
    row: Annotated[int, Field(ge=0)] = 0
    column: Annotated[int, Field(ge=0)] = 0


def tile(record: AttentionRecord, piece: MapTile, check: Callable[[], None]) -> bytes:
    """Return a tile of a map as deflated 16-bit integers: rounded `LEVELS * sqrt(weight)`, or 65,535 if masked.

    Args:
        record: the recorded attention.
        piece: the head and the tile.
        check: function that is called often; its error ends the computation.

    Raises:
        InputError: the head or the tile does not exist.
    """
    pool, head = piece.pool, piece.head
    queries, keys = record.query_BHTE.shape[2], record.key_BKSE.shape[2]
    extent = SIDE * pool
    first, left = piece.row * extent, piece.column * extent
    if not (head < record.num_heads and first < queries and left < keys):
        raise InputError(f"head {head} has no tile {piece.row}, {piece.column} of {extent} tokens on each side")
    last, right = min(queries, first + extent), min(keys, left + extent)
    parts = []
    step = max(1, _MOST_SCORES // keys // pool) * pool
    for start in range(first, last, step):
        check()
        rows = slice(start, min(last, start + step))
        # In a causal map, skip the keys after the last of these queries: half of all keys.
        seen = record.beginning(rows.stop) if record.is_only_causal and queries == keys else record
        weights_QK = _weights(seen, head, rows)[:, left:right]
        pooled = _max_pool(weights_QK, pool)
        missing = math.ceil((right - left) / pool) - pooled.shape[1]
        parts.append(F.pad(pooled, (0, missing), value=-1.0) if missing else pooled)
    numbers = torch.cat(parts)
    codes = np.rint(LEVELS * numbers.clamp(0, 1).sqrt_().numpy()).astype("<u2")
    codes[numbers.numpy() < 0] = MASKED
    return zlib.compress(codes.tobytes(), 1)


def _max_pool(weights_QK: Float32[Tensor, "queries keys"], pool: int) -> Float32[Tensor, "rows columns"]:
    """Return the largest weight of each square of `pool` queries and keys; squares at the end are smaller."""
    if pool == 1:
        return weights_QK
    queries, keys = weights_QK.shape
    if keys % pool or queries % pool:
        weights_QK = F.pad(weights_QK, (0, -keys % pool, 0, -queries % pool), value=-1.0)
    squares: Tensor = weights_QK.unflatten(0, (-1, pool)).amax(1).unflatten(1, (-1, pool)).amax(2)
    return squares


@torch.no_grad()
def _weights(record: AttentionRecord, head: int, rows: slice) -> Float32[Tensor, "queries keys"]:
    """Return the weights of some queries of one head, -1 where a key is masked."""
    weights, mask = record.weights_and_mask([head], rows)
    weights_QK = weights[0, 0]
    if mask is not None:
        weights_QK = weights_QK.masked_fill(~mask[0, min(head, mask.shape[1] - 1)], -1.0)
    return weights_QK.cpu()


def rows_of_weights(record: AttentionRecord, query: int) -> bytes:
    """Return the weights of one query in every head as deflated float32 [heads, keys], negative where masked.

    Raises:
        InputError: the query does not exist.
    """
    if not 0 <= query < record.query_BHTE.shape[2]:
        raise InputError(f"there is no query {query}; there are {record.query_BHTE.shape[2]}")
    rows = [_weights(record, head, slice(query, query + 1))[0] for head in range(record.num_heads)]
    return zlib.compress(torch.stack(rows).numpy().astype("<f4").tobytes(), 1)
