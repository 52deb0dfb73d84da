"""How the loss and its gradients are computed: by one process, or by several of which each has a share of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clearhead.checkpoints.weights.files import load_tensors, save_tensors
from clearhead.training.parallel.shares import BatchLoss, Share
from clearhead.training.protocols import BatchT, Loss


class Engine(Generic[BatchT]):
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

    def settle(self, batch: BatchT) -> None:
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

    def placed(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return whole weights as the module holds them."""
        return weights

    def save(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write named tensors to a safetensors file."""
        save_tensors(path, tensors)

    def help_to_save(self, files: Sequence[Mapping[str, Tensor]]) -> None:
        """Take part in the writing of files by the first process: their tensors, in the order of writing."""

    def load(self, path: Path) -> dict[str, Tensor]:
        """Read the named tensors of a file of a checkpoint."""
        return load_tensors(path)


class Replicated(Engine[Share[BatchT]]):
    """Every process holds the whole model, and PyTorch's DistributedDataParallel adds up the gradients.

    Args:
        module: the module to train; the first process's weights are sent to all.
        loss: gives, for a batch, the summed loss and the number of labels.
        size: how many processes there are.

    Source: arXiv 2006.15704.
    """

    def __init__(self, module: nn.Module, loss: Loss[BatchT], size: int) -> None:
        super().__init__(module, loss)
        self.divisor = size
        self._parallel = DistributedDataParallel(BatchLoss(module, loss), gradient_as_bucket_view=True)

    def loss(self, batch: Share[BatchT], *, is_last: bool) -> tuple[Tensor, int]:
        """Return the summed loss of a share, and the number of its labels; arguments as of `Engine.loss`."""
        self._parallel.require_backward_grad_sync = is_last
        loss: tuple[Tensor, int] = self._parallel(batch)
        return loss
