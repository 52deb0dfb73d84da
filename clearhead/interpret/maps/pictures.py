"""Pictures of attention maps.

Legend: H heads, T queries, S keys, N cells of a thumbnail's side.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.interpret.maps.head_statistics import query_chunks
from clearhead.interpret.maps.recording import AttentionRecord
from clearhead.interpret.view.attention import StackThumbnails, draw_overview

THUMBNAIL = 64
"""The most cells of a thumbnail's side: each is the largest weight of its tokens."""


def draw_record_overview(records: Sequence[AttentionRecord], path: Path, *, title: str) -> None:
    """Draw every head of some attentions as a thumbnail.

    Args:
        records: the attentions, those of a stack together.
        path: the .png or .svg file.
        title: one line above.
    """
    stacks = []
    for name in dict.fromkeys(record.stack for record in records):
        own = [record for record in records if record.stack == name]
        heads = [thumbnails(record).numpy() for record in own]
        stacks.append(StackThumbnails(name, [record.layer for record in own], heads))
    draw_overview(stacks, path, title=title)


def thumbnails(record: AttentionRecord) -> Float[Tensor, "heads rows columns"]:
    """Return the weights of each head; of more than `THUMBNAIL` tokens, the largest weight of each part.

    Args:
        record: of a single text.
    """
    device = record.query_BHTE.device
    bin_T, bin_S = (_bins(size, device) for size in (record.query_BHTE.shape[2], record.key_BKSE.shape[2]))
    rows, columns = int(bin_T[-1]) + 1, int(bin_S[-1]) + 1
    small_HNN = torch.zeros(record.num_heads, rows, columns, device=device)
    for queries, weights_BHTS in query_chunks(record):
        weights_HTS = weights_BHTS[0]
        narrow_HTN = weights_HTS.new_zeros(*weights_HTS.shape[:2], columns)
        narrow_HTN.scatter_reduce_(2, bin_S.expand_as(weights_HTS), weights_HTS, "amax")
        small_HNN.scatter_reduce_(1, bin_T[queries, None].expand_as(narrow_HTN), narrow_HTN, "amax")
    return small_HNN.cpu()


def _bins(size: int, device: torch.device) -> Tensor:
    """Return the cell of a thumbnail that each token belongs to."""
    return torch.arange(size, device=device) * min(size, THUMBNAIL) // size
