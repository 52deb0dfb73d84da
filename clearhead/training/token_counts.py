"""How much there is to compute in training batches.

What a run costs in matrix products follows from its spec and from these numbers, so a run remembers them among its
choices: text of the same size is more work as few long sequences than as many short ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from clearhead.training.protocols import Batches

PREFIX: Final = "work."
MOST_BATCHES: Final = 100
"""So many batches of a shuffled epoch are like the rest of it, and are made in less than a second."""


@dataclass(frozen=True)
class Work:
    """What some training text asks to compute; padding is never counted.

    Attributes:
        tokens: as a run counts the tokens it saw.
        first_tokens: read by the first stack: the encoder, or the only one.
        first_pairs: of a query and a key of one sequence (of one document, where a block holds several) there.
        second_tokens, second_pairs: the same for the decoder of a model with two stacks.
        memory_pairs: of a token of the decoder and a token of the encoder.
        outputs: positions that have a label.
        sequences: rows of the batches, each with one output in a model that answers once for a sequence.
    """

    tokens: int | float = 0
    first_tokens: int | float = 0
    first_pairs: int | float = 0
    second_tokens: int | float = 0
    second_pairs: int | float = 0
    memory_pairs: int | float = 0
    outputs: int | float = 0
    sequences: int | float = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def scaled(self, tokens: int | float) -> Work:
        """Return the work of more text of the same kind.

        Args:
            tokens: how much text, as a run counts the tokens it saw.
        """
        return Work(*(getattr(self, one.name) * tokens / self.tokens for one in fields(self)))

    def choices(self) -> dict[str, int | float]:
        """Return it as entries of a run's remembered choices."""
        return {f"{PREFIX}{name}": value for name, value in asdict(self).items()}

    @classmethod
    def from_choices(cls, choices: Mapping[str, Any]) -> Work | None:
        """Take back what `choices` returned, or None where a run does not remember it."""
        found = {one.name: choices.get(f"{PREFIX}{one.name}") for one in fields(cls)}
        numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
        return cls(**numbers) if len(numbers) == len(found) and numbers["tokens"] > 0 else None


def measure_work(batches: Batches[Any], most: int = MOST_BATCHES) -> Work:
    """Add up the work of the next batches of one epoch at most, and go back to where they began.

    Args:
        batches: training batches.
        most: how many batches to look at; fewer where an epoch has fewer.
    """
    place, count = batches.state(), min(most, batches.batches_per_epoch)
    work = sum((batch_work(next(batches)) for _ in range(count)), Work())
    batches.load_state(place)
    return work


def batch_work(batch: Any) -> Work:
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
    return Work(
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
