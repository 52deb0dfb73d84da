"""Training engines: loss and gradients of a batch in one process, or in several that divide its rows."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clearhead.checkpoints.runs.checkpoint import Checkpoint, load_checkpoint, read_checked_state
from clearhead.checkpoints.weights.files import load_tensors, save_tensors
from clearhead.data.batches.base import Batch, Batches, BatchT, DeviceBatch, Loss
from clearhead.training.parallel.processes import Processes
from clearhead.training.parallel.world import Process


@dataclass(frozen=True)
class RankBatch(DeviceBatch, Generic[BatchT]):
    """The rows of a batch that one process computes.

    Args:
        batch: the rows of this process.
        counts: True if the rows contribute to the loss. A process without rows computes the first row again, with a
            loss of 0, so that it takes part in every reduction.
    """

    batch: BatchT
    counts: bool = True

    @property
    def num_tokens(self) -> int:
        """The number of source and target tokens in the rows; 0 if the rows do not contribute to the loss."""
        return self.batch.num_tokens if self.counts else 0

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the rows, by field."""
        rows: Any = self.batch
        tensors: dict[str, Tensor] = rows.tensors()
        return tensors

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> RankBatch[BatchT]:
        """Return the same rows on a device; the arguments are those of `DeviceBatch.to`."""
        rows: Any = self.batch
        return replace(self, batch=rows.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> RankBatch[BatchT]:
        """Return the same rows in pinned memory."""
        rows: Any = self.batch
        return replace(self, batch=rows.pin_memory())


def take_rank_rows(batch: BatchT, process: Process) -> RankBatch[BatchT]:
    """Return the rows of a batch that a process computes: rank, rank + size, rank + 2 size, ...

    Args:
        batch: the whole batch, which every process makes.
        process: the process.
    """
    assert isinstance(batch, Batch), "only a Batch can be divided: call check_divisible first"
    counts = process.rank < len(batch.rows)
    share: Any = batch.take_rows(slice(process.rank, None, process.size) if counts else slice(1))
    return RankBatch(share, counts)


class RankBatches(Generic[BatchT]):
    """Endless batches with the rows that one process computes.

    Args:
        whole: the whole batches; their position is the same in every process.
        process: the process.
    """

    def __init__(self, whole: Batches[BatchT], process: Process) -> None:
        self._whole, self._process = whole, process

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches in one pass over the data."""
        return self._whole.batches_per_epoch

    def __next__(self) -> RankBatch[BatchT]:
        return take_rank_rows(next(self._whole), self._process)

    def state(self) -> dict[str, Any]:
        """Return the position in the data as JSON values."""
        return self._whole.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to a position that `state` returned."""
        self._whole.load_state(state)


class BatchLoss(nn.Module):
    """A module whose output is the loss of a batch; PyTorch's engines wrap it.

    Args:
        module: the module to train.
        loss: a function that returns the summed loss of a batch and the number of its labels.
    """

    def __init__(self, module: nn.Module, loss: Loss[BatchT]) -> None:
        super().__init__()
        self.module = module
        self._loss: Loss[Any] = loss

    def forward(self, share: RankBatch[BatchT]) -> tuple[Tensor, int]:
        """Return the summed loss of the rows of this process, and the number of their labels."""
        loss, num_labels = self._loss(self.module, share.batch)
        return (loss, num_labels) if share.counts else (loss * 0.0, 0)


@dataclass
class StepSums:
    """Sums over the batches of one step: loss, labels and tokens.

    Args:
        loss: the loss summed over all labels; not finite if the loss of one batch is not.
        num_labels: the number of labels that were predicted.
        num_tokens: the number of source and target tokens.
        not_finite: the number of the first batch whose loss is not finite, counted from 1; 0 if all are finite.
    """

    loss: float = 0.0
    num_labels: int = 0
    num_tokens: int = 0
    not_finite: int = 0

    def add(self, num_labels: int, num_tokens: int) -> None:
        """Add the labels and tokens of a batch."""
        self.num_labels += num_labels
        self.num_tokens += num_tokens

    def add_losses(self, losses: Sequence[float]) -> None:
        """Add the losses of all batches of the step."""
        for number, loss in enumerate(losses, start=1):
            self.loss += loss
            if not math.isfinite(loss) and not self.not_finite:
                self.not_finite = number

    def row(self) -> list[float]:
        """Return the sums as a list of numbers, for the exchange between processes."""
        return [self.loss, float(self.num_labels), float(self.num_tokens), float(self.not_finite)]

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> StepSums:
        """Return the sums of all processes, added up in the order of their ranks."""
        losses, labels, tokens, numbers = zip(*(row[:4] for row in rows), strict=True)
        first = min((int(number) for number in numbers if number), default=0)
        return cls(sum(losses), int(sum(labels)), int(sum(tokens)), first)


@dataclass(frozen=True)
class AgreedStop:
    """Stop conditions that all processes of a training have agreed on.

    Args:
        seconds: the run time in seconds, by the clock of the first process.
        signal: the stop signal that a process got. None means no signal.
    """

    seconds: float = 0.0
    signal: signal.Signals | None = None

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> AgreedStop:
        """Return the stop conditions from the rows of numbers that all processes exchanged after a step.

        The last two numbers of a row are the number of the stop signal (0 for none) and the run time in seconds.
        """
        number = int(max(row[-2] for row in rows))
        return cls(rows[0][-1], signal.Signals(number) if number else None)


class TrainingEngine(Generic[BatchT]):
    """The training engine of one process, which computes whole batches; base class of the others.

    Args:
        module: the module to train.
        loss: a function that returns the summed loss of a batch and the number of its labels.

    Attributes:
        divisor: the number by which gradients are divided when they are added up over the processes.
        is_sharded: True if each process holds only a shard of each weight. Then all processes must take part in
            reading and writing weights.
    """

    divisor = 1
    is_sharded: ClassVar[bool] = False

    def __init__(self, module: nn.Module, loss: Loss[Any]) -> None:
        self.module = module
        self._loss = loss

    def loss(self, batch: BatchT, *, is_last: bool) -> tuple[Tensor, int]:
        """Return the summed loss of a batch, and the number of its labels.

        Args:
            batch: the batch, or the rows of it that this process computes.
            is_last: True if the batch is the last one before an update; its backward pass adds up the gradients of all
                processes.
        """
        return self._loss(self.module, batch)

    def warm_up(self, batch: BatchT) -> None:
        """Run a pass that changes no weights, so that the first step adds up gradients in the order of later steps.

        DistributedDataParallel takes this order from its first pass.
        """
        loss, _ = self.loss(batch, is_last=True)
        loss.backward()
        self.module.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Return a context manager in which the module has whole weights, for calls outside `loss`."""
        yield

    def place_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return whole weights as this process holds them, such as in shards; a single process changes nothing."""
        return weights

    def save(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write named tensors to a safetensors file."""
        save_tensors(path, tensors)

    def join_save(self, files: Sequence[Mapping[str, Tensor]]) -> None:
        """Take part in the saving of `files` (named tensors) by the first process, if that needs all processes."""

    def load_checkpoint(self, folder: Path) -> Checkpoint:
        """Check the files of a checkpoint and load it.

        Raises:
            InputError: the checkpoint is damaged, or its format is not supported.
        """
        return load_checkpoint(folder)


class ReplicatedEngine(TrainingEngine[RankBatch[BatchT]]):
    """Engine with the whole model in every process; PyTorch's DistributedDataParallel adds up the gradients.

    Args:
        module: the module to train; the weights of the first process are sent to all.
        loss: a function that returns the summed loss of a batch and the number of its labels.
        processes: the processes that train together; only the first one reads and writes files, so each machine may
            have its own disk.

    Source: arXiv 2006.15704.
    """

    def __init__(self, module: nn.Module, loss: Loss[BatchT], processes: Processes) -> None:
        super().__init__(module, loss)
        self._processes = processes
        self.divisor: int = processes.size
        self._parallel = DistributedDataParallel(BatchLoss(module, loss), gradient_as_bucket_view=True)

    def loss(self, batch: RankBatch[BatchT], *, is_last: bool) -> tuple[Tensor, int]:
        """Return the summed loss of the rows of this process, and the number of their labels."""
        self._parallel.require_backward_grad_sync = is_last
        loss: tuple[Tensor, int] = self._parallel(batch)
        return loss

    def place_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the whole weights of the first process, which sends them to all."""
        return self._processes.broadcast_tensors(weights)

    def load_checkpoint(self, folder: Path) -> Checkpoint:
        """Load a checkpoint in the first process, which sends it to all; raises the errors of the base class."""
        is_first, broadcast = self._processes.is_first, self._processes.broadcast
        return load_checkpoint(
            folder,
            read=lambda folder: broadcast(read_checked_state(folder) if is_first else ({}, False)),
            load=lambda file: self._processes.broadcast_tensors(load_tensors(file) if is_first else {}),
        )
