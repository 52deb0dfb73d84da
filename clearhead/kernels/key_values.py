"""Keys and values that grow token by token. Legend: R rows, K key/value heads, S keys, E head size."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

New = Float[Tensor, "rows heads new head_size"]
Kept = Float[Tensor, "rows heads keys head_size"]


class KeyValues:
    """The keys and values of one attention, in a buffer that doubles when it is full."""

    def __init__(self) -> None:
        self.length = 0
        self.buffer: Float[Tensor, "2 rows heads capacity head_size"] | None = None

    def append(self, key_RKSE: New, value_RKSE: New) -> tuple[Kept, Kept]:
        """Add the newest tokens and return views of all of them."""
        end = self.length + key_RKSE.shape[2]
        if self.buffer is None or end > self.buffer.shape[3]:
            rows, heads, _, size = key_RKSE.shape
            grown = key_RKSE.new_empty(2, rows, heads, max(16, 2 * end), size)
            if self.buffer is not None:
                grown[:, :, :, : self.length] = self.buffer[:, :, :, : self.length]
            self.buffer = grown
        self.buffer[0, :, :, self.length : end] = key_RKSE
        self.buffer[1, :, :, self.length : end] = value_RKSE
        self.length = end
        return self.buffer[0, :, :, :end], self.buffer[1, :, :, :end]

    def select(self, rows: Int[Tensor, " new_rows"]) -> None:
        """Reorder, drop or repeat rows."""
        if self.buffer is not None:
            self.buffer = self.buffer[:, rows, :, : self.length]
