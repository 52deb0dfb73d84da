"""Averages of weights: an exponential moving average during training, and the mean of stored checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from clearhead.base.errors import InputError
from clearhead.base.files import refuse_absent
from clearhead.checkpoints.reference import ModelReference
from clearhead.checkpoints.runs.checkpoint import clear_leftovers, find_undamaged_weights, recent_folder
from clearhead.checkpoints.runs.directory import is_run_directory, open_run
from clearhead.checkpoints.runs.extra_weights import save_averaged
from clearhead.checkpoints.weights.files import load_merged


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


def average_run(run: Path, last: int) -> tuple[Path, list[int]]:
    """Average the weights of a run's newest checkpoints, recent weights included.

    Args:
        run: the run directory.
        last: how many, at least 1.

    Returns:
        The file of the averaged weights, and the averaged steps in ascending order.

    Raises:
        InputError: the folder is not a run, is in use, or has fewer undamaged checkpoints.
    """
    reference = ModelReference.parse(str(run))
    if reference.label is not None and is_run_directory(reference.folder):
        raise InputError(
            f"{run} names one checkpoint, but the last ones of a run are averaged: name {reference.folder}"
        )
    refuse_absent(run, "run directory")
    if not is_run_directory(run):
        raise InputError(f"{run} is not a run directory: it has no checkpoints folder.")
    # Not snapshots: the checkpoints that are averaged are as far apart as validations.
    files = find_undamaged_weights(recent_folder(run), run / "checkpoints")
    files.pop(0, None)
    if last > len(files):
        steps_text = ", ".join(map(str, files)) or "none"
        raise InputError(
            f"{run} has {len(files)} undamaged checkpoints to average (steps: {steps_text}), fewer than --last {last}: "
            "average fewer, or train with a larger train.keep"
        )
    steps = list(files)[-last:]
    with open_run(run, resume=True):
        clear_leftovers(run)
        weights = average_checkpoints([load_merged(files[step]) for step in steps])
        file = save_averaged(run, weights, {"steps": steps, "valid_loss": None, "valid_score": None})
    return file, steps
