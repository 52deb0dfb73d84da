"""What every batch is made of: padded rows of ids, masks and labels.

Shape suffixes: B rows, T columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy import ndarray
from torch import Tensor

from clearhead.core.kernels.linear_cross_entropy import NO_LABEL
from clearhead.data.arrays import Indices, Ragged
from clearhead.data.batches.shapes import padded_length
from clearhead.text.special_tokens import PrefixSuffix
from clearhead.text.tokenizer import Tokenizer

_NOTHING = PrefixSuffix()
BatchT = TypeVar("BatchT", bound="DeviceBatch")


@dataclass(frozen=True)
class DeviceBatch:
    """A batch whose tensors can be moved to a device together."""

    def to(self: BatchT, device: torch.device | str) -> BatchT:
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

    def part(self, rows: slice) -> Batch:
        """Return some rows of the batch, which keep its padding."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        cut: dict[str, Any] = {
            name: value[rows] for name, value in values.items() if isinstance(value, Tensor | ndarray)
        }
        sides = ((cut["ids"], cut.get("mask")), (cut.get("target_ids"), cut.get("target_mask")))
        tokens = sum(int(ids.numel() if mask is None else mask.sum()) for ids, mask in sides if ids is not None)
        return replace(self, **cut, num_labels=int((cut["labels"] != NO_LABEL).sum()), num_tokens=tokens)

    def parts(self, most: int | None) -> Iterator[Batch]:
        """Yield the batch in parts, which keep its padding.

        Args:
            most: rows of a part; None: all of them.
        """
        size = len(self.ids) if most is None else most
        return (self.part(slice(start, start + size)) for start in range(0, len(self.ids), size))


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
    for place, index in enumerate(special.suffix):
        ids_BT[np.arange(len(rows)), lengths_B + front + place] = index
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
