"""Batches: padded rows of ids, masks and labels, the protocols that training uses, and token counts.

Lengths and numbers of rows are rounded to few shapes, because some kernels are compiled for each shape. On CPUs with
matrix units, oneDNN compiles a kernel for each 16-bit product, by its number of rows * tokens. Each kernel takes some
milliseconds and almost a megabyte.

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

# With this step and rounded rows, Multi30k has 51 different products of rows and tokens instead of 102, for 2.5 % more
# padding.
_LEAST_LENGTH_STEP = 2

# GPUs multiply matrices in tiles of this number of rows.
_LABEL_STEP = 64


def padded_length(longest: int, limit: int) -> int:
    """Return the padded length of the rows of a batch, in tokens.

    Args:
        longest: the number of tokens of the longest row, at least 1.
        limit: the length of the longest row in the data set; padding never exceeds it, since a model may have no more
            positions.
    """
    step = max(_LEAST_LENGTH_STEP, shape_step(longest))
    return min(-(-longest // step) * step, limit)


def round_rows(most: int) -> int:
    """Round the maximum number of rows of a batch, at least 1, down to one of few batch sizes."""
    return most - most % shape_step(most)


_NOTHING = PrefixSuffix()
DeviceBatchT = TypeVar("DeviceBatchT", bound="DeviceBatch")


@dataclass(frozen=True)
class DeviceBatch:
    """A batch whose tensors move to a device together."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the batch, by field."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self: DeviceBatchT, device: torch.device | str, *, non_blocking: bool = False) -> DeviceBatchT:
        """Return the same batch with its tensors on a device.

        Args:
            device: the device.
            non_blocking: True to return before the copy has ended; it needs tensors in pinned memory.
        """
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=non_blocking) for name, value in self.tensors().items()
        }
        return replace(self, **moved)

    def pin_memory(self: DeviceBatchT) -> DeviceBatchT:
        """Return the same batch with its tensors in pinned memory, from which a GPU copies without waiting."""
        pinned: dict[str, Any] = {name: value.pin_memory() for name, value in self.tensors().items()}
        return replace(self, **pinned)


@dataclass(frozen=True)
class Batch(DeviceBatch):
    """A padded batch of training or validation examples.

    Masks are True at real tokens. A mask of None means that all tokens are real.

    Args:
        ids: the input ids of the first stack.
        mask: the mask of `ids`.
        labels: one id per token of the last stack, NO_LABEL where none is predicted. If the task labels whole
            examples: one class or number per example, or 1 or 0 per class.
        num_labels: the number of labels that are not NO_LABEL.
        num_tokens: the number of real tokens that the stacks read.
        rows: the numbers of these examples in the store.
        target_ids: the input ids of the decoder of a two-stack model, already shifted.
        target_mask: the mask of `target_ids`.
        documents: the document number of each of `ids`. None means that each row is one document.
        segments: the segment number of each of `ids`.
        label_rows: the indices of the labelled tokens in the flattened `labels`, for batches in which few tokens are
            labelled; see `find_label_rows`. None means that all tokens count as labelled.
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
    label_rows: Int64[Tensor, " labelled"] | None = None

    def take_rows(self, rows: slice) -> Batch:
        """Return a batch with only the given rows, padded to the length of the whole batch."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        cut: dict[str, Any] = {
            name: value[rows] for name, value in values.items() if isinstance(value, Tensor | ndarray)
        }
        if self.label_rows is not None:
            cut["label_rows"] = find_label_rows(cut["labels"])
        sides = ((cut["ids"], cut.get("mask")), (cut.get("target_ids"), cut.get("target_mask")))
        tokens = sum(int(ids.numel() if mask is None else mask.sum()) for ids, mask in sides if ids is not None)
        return replace(self, **cut, num_labels=int((cut["labels"] != NO_LABEL).sum()), num_tokens=tokens)

    def split_rows(self, most: int | None) -> Iterator[Batch]:
        """Split the batch into smaller batches of consecutive rows, padded to the length of the whole batch.

        Args:
            most: the maximum number of rows in a smaller batch. None means all rows.
        """
        size = len(self.ids) if most is None else most
        return (self.take_rows(slice(start, start + size)) for start in range(0, len(self.ids), size))


def find_label_rows(labels_BT: Int64[Tensor, "batch tokens"]) -> Int64[Tensor, " labelled"]:
    """Return the indices of the labelled tokens in the flattened labels of a batch on the host.

    A GPU computes outputs at these tokens alone; it could not count them without waiting for the host. Some tokens
    without a label follow, up to a multiple of 64 or to the size of the batch, so that there are few shapes.
    """
    is_labelled_N = labels_BT.flatten().cpu().numpy() != NO_LABEL
    rows_N, others_N = np.flatnonzero(is_labelled_N), np.flatnonzero(~is_labelled_N)
    return torch.from_numpy(np.concatenate([rows_N, others_N[: -len(rows_N) % _LABEL_STEP]]))


@dataclass(frozen=True)
class PaddedRows:
    """Token ids of a batch, padded on the right, and their mask, which is True at real tokens."""

    ids: Int64[Tensor, "rows columns"]
    mask: Bool[Tensor, "rows columns"]

    @property
    def padding_mask(self) -> Bool[Tensor, "rows columns"] | None:
        """The mask, or None if no row is padded, so that attention can skip it."""
        return None if bool(self.mask.all()) else self.mask

    @property
    def num_tokens(self) -> int:
        """The number of tokens without padding."""
        return int(self.mask.sum())


def pad_rows(rows: Ragged, special: PrefixSuffix = _NOTHING, *, fill: int, limit: int | None = None) -> PaddedRows:
    """Pad rows on the right, after adding special ids.

    Args:
        rows: at least one row of ids.
        special: the special ids before and after each row.
        fill: the padding id.
        limit: the limit of `padded_length`. None means that rows are padded to the longest of them.
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
    """Make a batch for an encoder-decoder: the encoder reads the sources, the decoder learns to write the targets.

    Args:
        sources, targets: the ids of the texts, without special ids.
        source_tokenizer, target_tokenizer: the tokenizers, which define the special ids and the padding id.
        rows: the numbers of these examples in the store.
        limits: the argument `limit` of `pad_rows`, for sources and for targets.
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
    """Protocol of a batch that knows its number of tokens."""

    @property
    def num_tokens(self) -> int:
        """The number of source and target tokens, without padding."""


BatchT = TypeVar("BatchT", bound=CountedBatch)
BatchT_co = TypeVar("BatchT_co", bound=CountedBatch, covariant=True)

Loss = Callable[[nn.Module, BatchT], tuple[Tensor, int]]
"""A function of module and batch that returns the summed loss (a scalar with gradient) and the number of labels."""


@runtime_checkable
class Batches(Protocol[BatchT_co]):
    """An endless iterator over training batches, whose position can be saved and restored."""

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches in one pass over the data."""

    def __next__(self) -> BatchT_co:
        """Return the next batch."""

    def state(self) -> dict[str, Any]:
        """Return the position in the data as JSON values."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a position in the data that `state` returned."""


MOST_BATCHES: Final = 100
"""The number of batches that are counted: they represent a shuffled epoch, and are made in less than a second."""


def count_tokens(batches: Batches[Any], most: int = MOST_BATCHES) -> TokenCounts:
    """Return the token counts of the next batches; their position is restored afterwards.

    Args:
        batches: the training batches.
        most: the number of batches to count, at most one epoch.
    """
    before, count = batches.state(), min(most, batches.batches_per_epoch)
    work = sum((count_batch(next(batches)) for _ in range(count)), TokenCounts())
    batches.load_state(before)
    return work


def count_batch(batch: Any) -> TokenCounts:
    """Return the token counts of one batch of any task.

    Args:
        batch: a batch with `num_tokens`, `num_labels`, `ids` [B, T] and `mask` [B, T] or None. It may also
            have `target_ids` [B, U] and `target_mask` for a second stack. A second text of the first stack is in
            `other_ids` and `other_mask`. `documents` [B, T] has the document number of each token.
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
    """Return the number of tokens of each document in each row."""
    row_BT = torch.arange(len(documents_BT), device=documents_BT.device)[:, None].expand(documents_BT.shape)
    both_2N = torch.stack([row_BT.flatten(), documents_BT.flatten()])
    if mask_BT is not None:
        both_2N = both_2N[:, mask_BT.flatten()]
    counts: Tensor = both_2N.unique(dim=1, return_counts=True)[1]
    return counts.cpu()


def _square(lengths: Int[Tensor, " sequences"]) -> int:
    return int((lengths * lengths).sum())
