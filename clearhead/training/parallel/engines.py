"""Loss and gradients of a batch: in one process, or in several of which each computes some of the rows."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clearhead.checkpoints.runs.checkpoint import Checkpoint, load_checkpoint, read_checked_state
from clearhead.checkpoints.weights.files import load_tensors, save_tensors
from clearhead.data.batches.base import Batch, Batches, BatchT, Loss
from clearhead.training.parallel.processes import Processes
from clearhead.training.parallel.world import Process


@dataclass(frozen=True)
class RankBatch(Generic[BatchT]):
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


def take_rank_rows(batch: BatchT, process: Process) -> RankBatch[BatchT]:
    """Return the share of one process in a batch.

    Args:
        batch: the whole batch, which every process makes for itself.
        process: which one.
    """
    assert isinstance(batch, Batch), "other batches are refused before training"
    counts = process.rank < len(batch.rows)
    share: Any = batch.take_rows(slice(process.rank, None, process.size) if counts else slice(1))
    return RankBatch(share, counts)


class RankBatches(Generic[BatchT]):
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

    def __next__(self) -> RankBatch[BatchT]:
        return take_rank_rows(next(self._whole), self._process)

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

    def forward(self, share: RankBatch[BatchT]) -> tuple[Tensor, int]:
        """Return the summed loss of a share, and the number of its labels."""
        loss, num_labels = self._loss(self.module, share.batch)
        return (loss, num_labels) if share.counts else (loss * 0.0, 0)


@dataclass
class StepSums:
    """The sums of one step.

    Args:
        loss: summed over the labels; not finite as soon as that of one batch is not.
        num_labels: labels that were predicted.
        num_tokens: source and target tokens.
        not_finite: the number of the first batch whose loss is not finite; 0: all are.
    """

    loss: float = 0.0
    num_labels: int = 0
    num_tokens: int = 0
    not_finite: int = 0

    def add(self, loss: float, num_labels: int, num_tokens: int, number: int) -> None:
        """Add one batch, counted from 1."""
        self.loss += loss
        self.num_labels += num_labels
        self.num_tokens += num_tokens
        if not math.isfinite(loss) and not self.not_finite:
            self.not_finite = number

    def row(self) -> list[float]:
        """Return the sums as numbers."""
        return [self.loss, float(self.num_labels), float(self.num_tokens), float(self.not_finite)]

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> StepSums:
        """Return the sums over the rows of all processes, added up in the order of their ranks."""
        losses, labels, tokens, numbers = zip(*(row[:4] for row in rows), strict=True)
        first = min((int(number) for number in numbers if number), default=0)
        return cls(sum(losses), int(sum(labels)), int(sum(tokens)), first)


@dataclass(frozen=True)
class AgreedStop:
    """What ends a training of several processes, as all of them know it.

    Args:
        seconds: of the run, by the clock of the first process.
        signal: that one of them received; None: none did.
    """

    seconds: float = 0.0
    signal: signal.Signals | None = None

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> AgreedStop:
        """Return it from the rows of all processes, whose last two numbers are the signal, or 0, and the seconds."""
        number = int(max(row[-2] for row in rows))
        return cls(rows[0][-1], signal.Signals(number) if number else None)


class TrainingEngine(Generic[BatchT]):
    """One process, which computes whole batches.

    Args:
        module: the module to train.
        loss: gives, for a batch, the summed loss and the number of labels.

    Attributes:
        divisor: by which the gradients are divided while they are added up over the processes.
        is_sharded: whether a process holds only a part of each weight, so that all of them are needed for whatever
            reads or writes weights.
    """

    divisor = 1
    is_sharded: ClassVar[bool] = False

    def __init__(self, module: nn.Module, loss: Loss[Any]) -> None:
        self.module = module
        self._loss = loss

    def loss(self, batch: BatchT, *, is_last: bool) -> tuple[Tensor, int]:
        """Return the summed loss of a batch, and the number of its labels.

        Args:
            batch: what this process computes.
            is_last: whether it is the last one before an update: its backward pass adds up the gradients of all
                processes.
        """
        return self._loss(self.module, batch)

    def warm_up(self, batch: BatchT) -> None:
        """Make one pass without effect: what an engine decides in its first one then holds for every step.

        DistributedDataParallel takes the order of the gradients from it, by which they are added up from then on.
        """
        loss, _ = self.loss(batch, is_last=True)
        loss.backward()
        self.module.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Have whole weights in the module, for calls that do not come from `loss`."""
        yield

    def place_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return whole weights of the first process as the module holds them."""
        return weights

    def save(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write named tensors to a safetensors file."""
        save_tensors(path, tensors)

    def join_save(self, files: Sequence[Mapping[str, Tensor]]) -> None:
        """Take part in the writing of files by the first process: their tensors, in the order of writing."""

    def load_checkpoint(self, folder: Path) -> Checkpoint:
        """Load a checkpoint after checking its files.

        Raises:
            InputError: the checkpoint is damaged, or its format is not supported.
        """
        return load_checkpoint(folder)


class ReplicatedEngine(TrainingEngine[RankBatch[BatchT]]):
    """Every process holds the whole model, and PyTorch's DistributedDataParallel adds up the gradients.

    Args:
        module: the module to train; the first process's weights are sent to all.
        loss: gives, for a batch, the summed loss and the number of labels.
        processes: that train; only the first one reads and writes files, so that each machine may have its own disk.

    Source: arXiv 2006.15704.
    """

    def __init__(self, module: nn.Module, loss: Loss[BatchT], processes: Processes) -> None:
        super().__init__(module, loss)
        self._processes = processes
        self.divisor: int = processes.size
        self._parallel = DistributedDataParallel(BatchLoss(module, loss), gradient_as_bucket_view=True)

    def loss(self, batch: RankBatch[BatchT], *, is_last: bool) -> tuple[Tensor, int]:
        """Return the summed loss of a share, and the number of its labels; arguments as of `Engine.loss`."""
        self._parallel.require_backward_grad_sync = is_last
        loss: tuple[Tensor, int] = self._parallel(batch)
        return loss

    def place_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return whole weights of the first process, which sends them to all."""
        return self._processes.broadcast_tensors(weights)

    def load_checkpoint(self, folder: Path) -> Checkpoint:
        """Load a checkpoint in the first process, which sends it to all; exceptions are those of `Engine`."""
        is_first, broadcast = self._processes.is_first, self._processes.broadcast
        return load_checkpoint(
            folder,
            read=lambda folder: broadcast(read_checked_state(folder) if is_first else ({}, False)),
            load=lambda file: self._processes.broadcast_tensors(load_tensors(file) if is_first else {}),
        )
