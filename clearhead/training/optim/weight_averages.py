"""Weight averages: an exponential moving average during training, and the mean of stored checkpoints."""

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

    Update n uses the decay min(decay, (1 + n) / (10 + n)): the initial weights soon have little influence. Integer
    buffers are copied.

    Args:
        module: the module; the average starts with its weights.
        decay: the factor of the old average in an update, at least 0 and below 1.

    Attributes:
        weights: the averaged weights by name, as in the state dict of the module.
        num_updates: the number of updates so far.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.num_updates: int = 0
        self.weights: dict[str, Tensor] = {name: value.detach().clone() for name, value in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Update the average with the current weights of the module."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        pairs: dict[type, list[tuple[Tensor, Tensor]]] = {}
        for name, value in module.state_dict().items():
            if value.is_floating_point():
                # Sharded and whole tensors cannot be in one list.
                pairs.setdefault(type(value), []).append((self.weights[name], value))
            else:
                self.weights[name].copy_(value)
        for alike in pairs.values():
            averages, weights = map(list, zip(*alike, strict=True))
            torch._foreach_lerp_(averages, weights, 1.0 - decay)

    def load(self, weights: Mapping[str, Tensor], num_updates: int) -> None:
        """Restore a stored average; raises KeyError or RuntimeError if it belongs to another model."""
        for name, value in self.weights.items():
            value.copy_(weights[name])
        self.num_updates = num_updates


@contextmanager
def weights_in_place(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Return a context manager in which a module has other weights; its own are restored bit for bit afterwards."""
    before = {name: value.detach().clone() for name, value in module.state_dict().items()}
    try:
        module.load_state_dict(weights)
        yield
    finally:
        module.load_state_dict(before)


def average_checkpoints(checkpoints: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of several state dicts, summed in float64.

    Args:
        checkpoints: the state dicts of one model, the newest last; read one at a time.

    Returns:
        The mean in the dtypes of the inputs; integer tensors are those of the last checkpoint.

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
            raise InputError(f"checkpoint {count} of the average has other tensors than checkpoint 1: {names}")
        for name, total in sums.items():
            total.add_(last[name])
    if not count:
        raise InputError("there is no checkpoint to average; train until the first validation, or name another run")
    return {
        name: (sums[name] / count).to(value.dtype) if name in sums else value.clone() for name, value in last.items()
    }


def average_run(run: Path, last: int) -> tuple[Path, list[int]]:
    """Average the weights of a run's newest checkpoints, and save the average in the run directory.

    Args:
        run: the run directory.
        last: the number of checkpoints to average, at least 1. Weights that `train.average` has kept count too.

    Returns:
        The file of the averaged weights, and the averaged steps in ascending order.

    Raises:
        InputError: the folder is not a run directory, is in use, or has fewer undamaged checkpoints.
    """
    reference = ModelReference.parse(str(run))
    if reference.label is not None and is_run_directory(reference.folder):
        raise InputError(
            f"{run} names one checkpoint, but an average needs the last checkpoints of a run: name {reference.folder}"
        )
    refuse_absent(run, "run directory")
    if not is_run_directory(run):
        raise InputError(f"{run} is not a run directory: it has no checkpoints folder")
    # No snapshots: averaged checkpoints are as far apart as validations.
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
