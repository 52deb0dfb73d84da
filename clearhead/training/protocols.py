"""What training expects of batches and of a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn


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
