"""The protocol of training batches, and the counters of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable


@runtime_checkable
class CountedBatch(Protocol):
    """A batch with a token count."""

    @property
    def num_tokens(self) -> int:
        """Source and target tokens, without padding."""


BatchT = TypeVar("BatchT", bound=CountedBatch)
BatchT_co = TypeVar("BatchT_co", bound=CountedBatch, covariant=True)


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


@dataclass
class Tally:
    """The counters of a run, saved in every checkpoint.

    Attributes:
        step: optimizer steps taken.
        tokens: source and target tokens seen.
        seconds: wall-clock seconds, over all resumptions.
        best_step: the step of the best validation, None before the first.
        best_value: its loss or score.
        misses: validations since the best one.
        validated_step: the last step that was validated.
        logged_step: the last step that has a line of metrics.
        recent: the last validated steps, for averaging.
        loss_sum, loss_count: training loss and labels since the last line of metrics.
        window_tokens, window_seconds: tokens and training time since the last line of metrics.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_value: float | None = None
    misses: int = 0
    validated_step: int = 0
    logged_step: int = 0
    recent: list[int] = field(default_factory=list)
    loss_sum: float = 0.0
    loss_count: int = 0
    window_tokens: int = 0
    window_seconds: float = 0.0
