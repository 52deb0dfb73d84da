"""Batches: their padded rows of ids, masks and labels, the protocols that training uses, and their token counts.

Lengths and numbers of rows are rounded to few shapes, because some kernels are made anew for every shape. On CPUs with
matrix units oneDNN makes one for each product in 16 bits, by its number of rows * tokens: some milliseconds and almost
a megabyte for each.

Shape suffixes: B rows, T columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from numpy import ndarray
from torch import Tensor, nn

from clearhead.core.kernels.linear_cross_entropy import NO_LABEL, shape_step
from clearhead.data.arrays import Indices, Ragged
from clearhead.spec.token_counts import TokenCounts
from clearhead.text.special_tokens import PrefixSuffix
from clearhead.text.tokenizer import Tokenizer

# With it, and with the steps of rows, Multi30k has 51 different products of rows and tokens instead of 102, for 2.5 %
# more padding.
_LEAST_LENGTH_STEP = 2


def padded_length(longest: int, limit: int) -> int:
    """Return how many tokens the rows of a batch have.

    Args:
        longest: tokens of the longest row, at least 1.
        limit: the longest row of all data, which no batch exceeds: a model may have no more positions.
    """
    step = max(_LEAST_LENGTH_STEP, shape_step(longest))
    return min(-(-longest // step) * step, limit)


def round_rows(most: int) -> int:
    """Return how many rows a batch has where it may have so many, at least 1."""
    return most - most % shape_step(most)


_NOTHING = PrefixSuffix()
DeviceBatchT = TypeVar("DeviceBatchT", bound="DeviceBatch")


@dataclass(frozen=True)
class DeviceBatch:
    """A batch whose tensors can be moved to a device together."""

    def to(self: DeviceBatchT, device: torch.device | str) -> DeviceBatchT:
        """Return the same batch with its tensors on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True)
class Batch(DeviceBatch):
    """A padded batch; masks are True at real tokens, and None if all tokens are real.

    Args:
        ids: what the first stack reads.
        mask: where `ids` is real.
        labels: an id for each token of the last stack, NO_LABEL where none is predicted; or for each example a class, a
            number, or 1 or 0 for each class.
        num_labels: labels that are not NO_LABEL.
        num_tokens: real tokens that the stacks read.
        rows: which examples of the store these are.
        target_ids: what the decoder of a two-stack model reads, already shifted.
        target_mask: where `target_ids` is real.
        documents: the document each of `ids` belongs to; None: each row is one.
        segments: the segment of each of `ids`.
    """

    ids: Int64[Tensor, "batch source"]
    mask: Bool[Tensor, "batch source"] | None
    labels: Int64[Tensor, "batch *labels"] | Float[Tensor, "batch *labels"]
    num_labels: int
    num_tokens: int
    rows: Int64[ndarray, " _"]
    target_ids: Int64[Tensor, "batch target"] | None = None
    target_mask: Bool[Tensor, "batch target"] | None = None
    documents: Int64[Tensor, "batch source"] | None = None
    segments: Int64[Tensor, "batch source"] | None = None

    def take_rows(self, rows: slice) -> Batch:
        """Return some rows of the batch, which keep its padding."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        cut: dict[str, Any] = {
            name: value[rows] for name, value in values.items() if isinstance(value, Tensor | ndarray)
        }
        sides = ((cut["ids"], cut.get("mask")), (cut.get("target_ids"), cut.get("target_mask")))
        tokens = sum(int(ids.numel() if mask is None else mask.sum()) for ids, mask in sides if ids is not None)
        return replace(self, **cut, num_labels=int((cut["labels"] != NO_LABEL).sum()), num_tokens=tokens)

    def split_rows(self, most: int | None) -> Iterator[Batch]:
        """Yield the batch in parts, which keep its padding.

        Args:
            most: rows of a part; None: all of them.
        """
        size = len(self.ids) if most is None else most
        return (self.take_rows(slice(start, start + size)) for start in range(0, len(self.ids), size))


@dataclass(frozen=True)
class PaddedRows:
    """Rows padded on the right, and a mask that is True at real tokens."""

    ids: Int64[Tensor, "rows columns"]
    mask: Bool[Tensor, "rows columns"]

    @property
    def padding_mask(self) -> Bool[Tensor, "rows columns"] | None:
        """The mask, or None if nothing is padded, so that attention need not look at it."""
        return None if bool(self.mask.all()) else self.mask

    @property
    def num_tokens(self) -> int:
        """The number of real tokens."""
        return int(self.mask.sum())


def pad_rows(rows: Ragged, special: PrefixSuffix = _NOTHING, *, fill: int, limit: int | None = None) -> PaddedRows:
    """Pad rows on the right.

    Args:
        rows: at least one.
        special: the special ids in front of each row and behind it.
        fill: the padding id.
        limit: as of `padded_length`; None: rows are padded to the longest of them.
    """
    lengths_B, front = rows.lengths, len(special.prefix)
    longest = int(lengths_B.max()) + len(special)
    column_T = np.arange(longest if limit is None else padded_length(longest, limit))
    ids_BT = np.full((len(rows), len(column_T)), fill, dtype=np.int64)
    ids_BT[(column_T >= front) & (column_T < lengths_B[:, None] + front)] = rows.ids
    ids_BT[:, :front] = special.prefix
    for offset, index in enumerate(special.suffix):
        ids_BT[np.arange(len(rows)), lengths_B + front + offset] = index
    return PaddedRows(torch.from_numpy(ids_BT), torch.from_numpy(column_T < lengths_B[:, None] + len(special)))


def seq2seq_batch(
    sources: Ragged,
    targets: Ragged,
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    rows: Indices,
    *,
    limits: tuple[int | None, int | None] = (None, None),
) -> Batch:
    """Make a batch for two stacks: the encoder reads the sources, the decoder learns to write the targets.

    Args:
        sources, targets: ids without special ids.
        source_tokenizer, target_tokenizer: add the special ids and the padding.
        rows: which examples these are.
        limits: of `pad_rows`, for each side.
    """
    special = target_tokenizer.special_tokens.for_target
    source = pad_rows(
        sources, source_tokenizer.special_tokens.for_source, fill=source_tokenizer.pad_id, limit=limits[0]
    )
    target = pad_rows(targets, special.decoder_input, fill=target_tokenizer.pad_id, limit=limits[1])
    labels = pad_rows(targets, special.labels, fill=NO_LABEL, limit=limits[1])
    return Batch(
        ids=source.ids,
        mask=source.mask,
        target_ids=target.ids,
        target_mask=target.mask,
        labels=labels.ids,
        num_labels=labels.num_tokens,
        num_tokens=source.num_tokens + labels.num_tokens,
        rows=rows,
    )


@runtime_checkable
class CountedBatch(Protocol):
    """A batch with a token count."""

    @property
    def num_tokens(self) -> int:
        """Source and target tokens, without padding."""


BatchT = TypeVar("BatchT", bound=CountedBatch)
BatchT_co = TypeVar("BatchT_co", bound=CountedBatch, covariant=True)

Loss = Callable[[nn.Module, BatchT], tuple[Tensor, int]]
"""Gives, for a batch, the summed loss (a scalar with gradient) and the number of its labels."""


@runtime_checkable
class Batches(Protocol[BatchT_co]):
    """An endless iterator over training batches whose position can be saved and restored."""

    @property
    def batches_per_epoch(self) -> int:
        """Batches in one pass over the data."""

    def __next__(self) -> BatchT_co:
        """Return the next batch."""

    def state(self) -> dict[str, Any]:
        """Return the position in the data as JSON values."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to a position in the data."""


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
