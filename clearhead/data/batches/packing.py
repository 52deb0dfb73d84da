"""Packs windows of unequal lengths into full blocks without cutting any of them."""

from __future__ import annotations

import numpy as np

from clearhead.data.arrays import Ragged, Rows, pack


def pack_windows(lengths: Rows, block: int) -> Ragged:
    """Put each window, the longest first, into the fullest block that has room for it.

    Args:
        lengths: of the windows, each from 1 to the block. Among equal ones their order decides.
        block: how much a block holds.

    Returns:
        The windows of each block, longest first; every window is in exactly one.

    Source: arXiv 2404.10830, section 3.1 (best-fit decreasing).
    """
    order = np.argsort(-lengths, kind="stable")
    assert not len(order) or 1 <= lengths[order[-1]] <= lengths[order[0]] <= block, "windows fit into a block"
    blocks: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(block + 1)]  # the blocks that have so much room left
    rooms = 0  # bit r is set where some block has room r
    for window, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
            blocks[chosen].append(window)
        else:
            room, chosen = block, len(blocks)
            blocks.append([window])
        left = room - length
        if left:
            with_room[left].append(chosen)
            rooms |= 1 << left
    return pack(blocks, np.dtype(np.int64))
