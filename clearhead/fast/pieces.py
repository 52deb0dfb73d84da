"""The new tokens of a call without the padding in front of them, in the pieces that kernels read them in.

Texts share a piece, or one of them is cut at fixed distances from its own start, so that what is computed of it does
not depend on those beside it.

Legend: B batch, T new tokens of a row with its padding, S keys, M rows that are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from clearhead.core.context import Masking

PIECE_TOKENS: Final = 2048
"""That run through all layers before the next ones do, so that what is computed of them stays small."""
Places = slice | Int[Tensor, " rows"]


@dataclass(frozen=True)
class Piece:
    """New tokens that are read together.

    Args:
        rows: of the batch.
        places: of the tokens, in the flattened batch.
        cu_seqlens: int64, the first token of each row and their number; None: each row has one.
        left: how many of the new tokens of a row that is cut come behind the piece.
    """

    rows: slice
    places: Places
    cu_seqlens: Int[Tensor, " ends"] | None
    left: int = 0

    @property
    def count(self) -> int:
        """The number of rows."""
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True)
class NewTokens:
    """The new tokens of a batch.

    Args:
        batch, length: with padding.
        first_keys: int64, the first key of each row behind its padding; None: there is no padding in front.
        mask: of the keys, where padding is elsewhere; such tokens are read as others.
    """

    batch: int
    length: int
    first_keys: Int[Tensor, " batch"] | None
    mask: Bool[Tensor, "batch keys"] | None

    @classmethod
    def of(cls, masking: Masking, batch: int) -> NewTokens:
        """Return the new tokens of a call."""
        mask_BS = masking.key_mask
        if mask_BS is None:
            return cls(batch, masking.num_queries, None, None)
        first_keys_B = mask_BS.byte().argmax(1)
        is_in_front = bool((mask_BS.sum(1) + first_keys_B == mask_BS.shape[1]).all())
        return cls(batch, masking.num_queries, *((first_keys_B, None) if is_in_front else (None, mask_BS)))

    def pieces(self, num_keys: int) -> Iterator[Piece]:
        """Give the pieces, those of a row one after the other, of rows that have so many keys at last."""
        if self.length == 1:
            yield Piece(slice(0, self.batch), slice(None), None)
            return
        padding = [0] * self.batch
        if self.first_keys is not None:
            padding = (self.first_keys - (num_keys - self.length)).clamp(min=0).tolist()
        row = 0
        while row < self.batch:
            ends = list(accumulate(self.length - left for left in padding[row:]))
            count = max(1, sum(end <= PIECE_TOKENS for end in ends))
            for token in range(0, ends[count - 1], PIECE_TOKENS):
                yield self._piece(row, count, padding, token)
            row += count

    def _piece(self, row: int, count: int, padding: list[int], token: int) -> Piece:
        """Return some whole rows, or the tokens of one from one of them on."""
        first, last = padding[row] + token, self.length
        if count == 1:
            last = min(last, first + PIECE_TOKENS)
            begin = row * self.length
            cu_seqlens = torch.tensor([0, last - first])
            return Piece(slice(row, row + 1), slice(begin + first, begin + last), cu_seqlens, self.length - last)
        some = padding[row : row + count]
        cu_seqlens = torch.tensor([0, *accumulate(self.length - left for left in some)])
        places: Places = slice(row * self.length, (row + count) * self.length)
        if any(some):
            tokens_NT = torch.arange(row * self.length, (row + count) * self.length).view(count, -1)
            places = tokens_NT[torch.arange(self.length) >= torch.tensor(some)[:, None]]
        return Piece(slice(row, row + count), places, cu_seqlens)
