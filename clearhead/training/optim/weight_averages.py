"""Averages of weights: a running one during training, and the mean of stored checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from clearhead.errors import InputError

NUM_UPDATES = "num_updates"
"""The entry of an average's state that is no weight: how many updates it has seen."""


class ExponentialAverage:
    """A running average of a module's weights that forgets old ones exponentially.

    The first updates use a smaller decay, min(decay, (1 + n) / (10 + n)) at update n, so that the start is forgotten
    soon. Integer buffers are not averaged: the last value counts.

    Args:
        module: whose weights to average; the average starts with them.
        decay: share of the average that an update keeps, from 0 up to but not 1.

    Raises:
        InputError: decay lies outside its range.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise InputError(f"the decay of an exponential average lies from 0 up to but not 1, got {decay}; try 0.999")
        self.decay = decay
        self._num_updates = 0
        self._average = {name: value.detach().clone() for name, value in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Take the module's present weights into the average."""
        self._num_updates += 1
        decay = min(self.decay, (1 + self._num_updates) / (10 + self._num_updates))
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                self._average[name].lerp_(value, 1.0 - decay)
            else:
                self._average[name].copy_(value)

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """Put the average into the module for the length of a with block; the weights come back bit by bit."""
        own = {name: value.detach().clone() for name, value in module.state_dict().items()}
        _check_alike(own, self._average, "the exponential average")
        try:
            module.load_state_dict(self._average)
            yield
        finally:
            module.load_state_dict(own)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averaged weights by name, and the number of updates under NUM_UPDATES."""
        return {**self._average, NUM_UPDATES: torch.tensor(self._num_updates)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state_dict` returned.

        Raises:
            InputError: the state belongs to other weights.
        """
        weights = {name: value for name, value in state.items() if name != NUM_UPDATES}
        if NUM_UPDATES not in state:
            raise InputError(
                f"the state of an exponential average has no entry {NUM_UPDATES}; was it written by another tool?"
            )
        _check_alike(self._average, weights, "the stored average")
        for name, value in weights.items():
            self._average[name].copy_(value)
        self._num_updates = int(state[NUM_UPDATES].item())


def average_checkpoints(checkpoints: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Take the mean of several state dicts, summed in float64.

    Args:
        checkpoints: state dicts of one model, the newest last; read one at a time.

    Returns:
        the mean in the dtypes of the inputs; integers, which have no mean, are those of the last.

    Raises:
        InputError: there is no checkpoint, or two of them belong to different models.
    """
    first: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    count = 0
    for checkpoint in checkpoints:
        if not count:
            first = dict(checkpoint)
            floats = {name: value for name, value in first.items() if value.is_floating_point()}
            sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in floats.items()}
        _check_alike(first, checkpoint, f"checkpoint {count + 1} of those to average")
        for name, total in sums.items():
            total.add_(checkpoint[name])
        last, count = checkpoint, count + 1
    if not count:
        raise InputError("there is no checkpoint to average; train until the first validation, or name another run")
    return {
        name: (sums[name] / count).to(value.dtype) if name in sums else value.clone() for name, value in last.items()
    }


def _check_alike(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], subject: str) -> None:
    """Refuse weights whose names, shapes or dtypes differ from the expected ones, all in one report."""
    faults = [f"{subject} lacks the tensor {name}" for name in expected if name not in found]
    faults += [f"{subject} has the unknown tensor {name}" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        ours, theirs = expected[name], found[name]
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            expects, got = f"{tuple(ours.shape)} {ours.dtype}", f"{tuple(theirs.shape)} {theirs.dtype}"
            faults.append(f"{subject}: {name} should be {expects}, got {got}")
    if faults:
        raise InputError.from_faults(sorted(faults), subject=subject)
