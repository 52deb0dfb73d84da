"""What each process computes of a batch: every so many-th of its rows, so that each is read once, by one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from torch import Tensor, nn

from clearhead.data.batches.base import Batch
from clearhead.training.parallel.processes import Process
from clearhead.training.protocols import Batches, BatchT, Loss


@dataclass(frozen=True)
class Share(Generic[BatchT]):
    """What one process computes of a batch.

    Args:
        batch: its rows.
        counts: whether they count; a process without a row repeats the first one, so that it takes part in every
            reduction.
    """

    batch: BatchT
    counts: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens that count."""
        return self.batch.num_tokens if self.counts else 0


def share_of(batch: BatchT, process: Process) -> Share[BatchT]:
    """Return the share of one process in a batch.

    Args:
        batch: the whole batch, which every process makes for itself.
        process: which one.
    """
    assert isinstance(batch, Batch), "other batches are refused before training"
    counts = process.rank < len(batch.rows)
    share: Any = batch.part(slice(process.rank, None, process.size) if counts else slice(1))
    return Share(share, counts)


class SharedBatches(Generic[BatchT]):
    """The shares of one process in endless batches.

    Args:
        whole: the batches; their position is the same on every process.
        process: which one.
    """

    def __init__(self, whole: Batches[BatchT], process: Process) -> None:
        self._whole, self._process = whole, process

    @property
    def batches_per_epoch(self) -> int:
        """Batches in one pass over the data."""
        return self._whole.batches_per_epoch

    def __next__(self) -> Share[BatchT]:
        return share_of(next(self._whole), self._process)

    def state(self) -> dict[str, Any]:
        """Return the position in the data as JSON values."""
        return self._whole.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to a position in the data."""
        self._whole.load_state(state)


class BatchLoss(nn.Module):
    """A module whose output is its loss, which is where PyTorch's engines hook in.

    Args:
        module: the module to train.
        loss: gives, for a batch, the summed loss and the number of labels.
    """

    def __init__(self, module: nn.Module, loss: Loss[BatchT]) -> None:
        super().__init__()
        self.module = module
        self._loss: Loss[Any] = loss

    def forward(self, share: Share[BatchT]) -> tuple[Tensor, int]:
        """Return the summed loss of a share, and the number of its labels."""
        loss, num_labels = self._loss(self.module, share.batch)
        return (loss, num_labels) if share.counts else (loss * 0.0, 0)
