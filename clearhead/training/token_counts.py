"""Count the tokens, pairs and outputs of training batches, from which the FLOPs of a run follow."""

from __future__ import annotations

from typing import Any, Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from clearhead.spec.token_counts import TokenCounts
from clearhead.training.protocols import Batches

MOST_BATCHES: Final = 100
"""So many batches of a shuffled epoch are like the rest of it, and are made in less than a second."""


def count_tokens(batches: Batches[Any], most: int = MOST_BATCHES) -> TokenCounts:
    """Add up the work of the next batches of one epoch at most, and go back to where they began.

    Args:
        batches: training batches.
        most: how many batches to look at; fewer where an epoch has fewer.
    """
    before, count = batches.state(), min(most, batches.batches_per_epoch)
    work = sum((count_batch(next(batches)) for _ in range(count)), TokenCounts())
    batches.load_state(before)
    return work


def count_batch(batch: Any) -> TokenCounts:
    """Return the work of one batch of any task.

    Args:
        batch: with `num_tokens`, `num_labels`, `ids` [B, T] and `mask` [B, T] or None, and, where the task has them,
            `target_ids` [B, U] and `target_mask` for a second stack, `other_ids` and `other_mask` for a second text
            of the first stack, and `documents` [B, T], the document of each token.
    """
    first = _lengths(batch.ids, batch.mask)
    documents = getattr(batch, "documents", None)
    pairs = _square(first) if documents is None else _square(_document_lengths(documents, batch.mask))
    first_tokens, sequences = int(first.sum()), len(first)
    other_ids, target_ids = getattr(batch, "other_ids", None), getattr(batch, "target_ids", None)
    if other_ids is not None:
        other = _lengths(other_ids, batch.other_mask)
        first_tokens, pairs, sequences = first_tokens + int(other.sum()), pairs + _square(other), sequences + len(other)
    second = torch.zeros_like(first) if target_ids is None else _lengths(target_ids, batch.target_mask)
    return TokenCounts(
        tokens=batch.num_tokens,
        first_tokens=first_tokens,
        first_pairs=pairs,
        second_tokens=int(second.sum()),
        second_pairs=_square(second),
        memory_pairs=int((first * second).sum()),
        outputs=batch.num_labels,
        sequences=sequences,
    )


def _lengths(ids_BT: Tensor, mask_BT: Tensor | None) -> Int[Tensor, " batch"]:
    rows, length = ids_BT.shape
    return torch.full((rows,), length) if mask_BT is None else mask_BT.sum(1).cpu()


def _document_lengths(
    documents_BT: Int[Tensor, "batch tokens"], mask_BT: Bool[Tensor, "batch tokens"] | None
) -> Int[Tensor, " documents"]:
    """Return the tokens of every document in every row."""
    row_BT = torch.arange(len(documents_BT), device=documents_BT.device)[:, None].expand(documents_BT.shape)
    both_2N = torch.stack([row_BT.flatten(), documents_BT.flatten()])
    if mask_BT is not None:
        both_2N = both_2N[:, mask_BT.flatten()]
    counts: Tensor = both_2N.unique(dim=1, return_counts=True)[1]
    return counts.cpu()


def _square(lengths: Int[Tensor, " sequences"]) -> int:
    return int((lengths * lengths).sum())
