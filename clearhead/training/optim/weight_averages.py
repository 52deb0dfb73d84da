"""Averages of weights: an exponential moving average during training, and the mean of stored checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from clearhead.base.errors import InputError


class ExponentialAverage:
    """An exponential moving average of a module's weights.

    Update n uses the decay min(decay, (1 + n) / (10 + n)), so that the initial weights are soon forgotten. Integer
    buffers are copied.

    Args:
        module: whose weights to average; the average starts with them.
        decay: share of the average that an update keeps, from 0 up to but not 1.

    Attributes:
        weights: the average by name, as in the module's state dict.
        num_updates: updates so far.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.num_updates: int = 0
        self.weights: dict[str, Tensor] = {name: value.detach().clone() for name, value in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Include the module's present weights in the average."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                self.weights[name].lerp_(value, 1.0 - decay)
            else:
                self.weights[name].copy_(value)

    def load(self, weights: Mapping[str, Tensor], num_updates: int) -> None:
        """Continue from stored weights; KeyError or RuntimeError if they belong to another model."""
        for name, value in self.weights.items():
            value.copy_(weights[name])
        self.num_updates = num_updates


@contextmanager
def weights_in_place(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Load other weights into a module for the length of a with block; its own weights come back bit by bit."""
    before = {name: value.detach().clone() for name, value in module.state_dict().items()}
    try:
        module.load_state_dict(weights)
        yield
    finally:
        module.load_state_dict(before)


def average_checkpoints(checkpoints: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of several state dicts, summed in float64.

    Args:
        checkpoints: state dicts of one model, the newest last; read one at a time.

    Returns:
        the mean in the dtypes of the inputs; integers are those of the last checkpoint.

    Raises:
        InputError: there is no checkpoint, or two of them belong to different models.
    """
    shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
    sums: dict[str, Tensor] = {}
    last: Mapping[str, Tensor] = {}
    count = 0
    for count, last in enumerate(checkpoints, start=1):
        shapes_here = {name: (value.shape, value.dtype) for name, value in last.items()}
        if count == 1:
            shapes = shapes_here
            sums = {
                name: value.to(torch.float64, copy=True) for name, value in last.items() if value.is_floating_point()
            }
            continue
        if shapes_here != shapes:
            names = ", ".join(sorted(dict(shapes_here.items() ^ shapes.items())))
            raise InputError(f"checkpoint {count} of those to average differs from the first in the tensors {names}")
        for name, total in sums.items():
            total.add_(last[name])
    if not count:
        raise InputError("there is no checkpoint to average; train until the first validation, or name another run")
    return {
        name: (sums[name] / count).to(value.dtype) if name in sums else value.clone() for name, value in last.items()
    }
