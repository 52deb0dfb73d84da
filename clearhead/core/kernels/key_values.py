"""KV cache of one attention, in a growing buffer. Legend: R rows, K key/value heads, S keys, E head size."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

NewKeys = Float[Tensor, "rows heads new head_size"]
AllKeys = Float[Tensor, "rows heads keys head_size"]


class KeyValues:
    """Cached keys and values of one attention, in a buffer that doubles when it is full."""

    def __init__(self) -> None:
        self.length: int = 0
        self.buffer: Float[Tensor, "2 rows heads capacity head_size"] | None = None

    def append(self, key_RKSE: NewKeys, value_RKSE: NewKeys) -> tuple[AllKeys, AllKeys]:
        """Append the keys and values of new tokens and return views of all keys and values."""
        start, filled = self.length, self.extend(key_RKSE.shape, key_RKSE)[:, :, :, : self.length]
        filled[0, :, :, start:], filled[1, :, :, start:] = key_RKSE, value_RKSE
        return filled[0], filled[1]

    def extend(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Make room for new keys and values [rows, heads, new, head_size], and return the buffer to fill."""
        start, self.length = self.length, self.length + shape[2]
        if self.buffer is None or self.length > self.buffer.shape[3]:
            grown = like.new_empty(2, *shape[:2], max(16, 2 * self.length), shape[3])
            if self.buffer is not None:
                grown[:, :, :, :start] = self.buffer[:, :, :, :start]
            self.buffer = grown
        return self.buffer

    def select(self, rows: Int[Tensor, " new_rows"]) -> None:
        """Reorder, drop or repeat cached sequences: new row i is old row `rows[i]`."""
        if self.buffer is not None:
            self.buffer = self.buffer[:, rows, :, : self.length]
