"""Compare two training runs of one job: all files bit for bit, or the gradients of one update."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.checkpoints.runs.checkpoint import (
    AVERAGED_WEIGHTS,
    OPTIMIZER,
    WEIGHTS,
    checkpoint_folder,
    checkpoint_steps,
    read_state,
)
from clearhead.checkpoints.runs.directory import flatten_keys
from clearhead.checkpoints.runs.metrics import FILE_NAME, read_metrics
from clearhead.checkpoints.weights.files import load_tensors

_FILES: Final = {WEIGHTS: "weights", OPTIMIZER: "optimizer state", AVERAGED_WEIGHTS: "averaged weights"}
# Optimizer states that equal the gradient, up to a factor, after the first update.
_GRADIENTS: Final = ("exp_avg", "momentum")
_FLOOR: Final = 1e-3
"""Smallest scale of a gradient, as a share of the largest gradient: zero gradients differ by rounding alone."""
_TINY: Final = 1e-30


@dataclass(frozen=True)
class RunDifference:
    """One difference between two runs that should be equal bit for bit.

    Attributes:
        step: step of the checkpoint or of the line of metrics.
        description: text that names the values that differ.
    """

    step: int
    description: str

    def __str__(self) -> str:
        """Return the difference in words."""
        return f"step {self.step}: {self.description}"


def find_differences(run: Path, other: Path, last: int, names: Sequence[str]) -> list[RunDifference]:
    """Return the differences between two runs up to a step, ordered by step; measured times are not compared.

    Args:
        run, other: run directories.
        last: last step to compare.
        names: addresses of the weights, in the order of the optimizer.
    """
    all_differences = list(_compare_metrics(run, other, last))
    for step in sorted({*checkpoint_steps(run)} & {*checkpoint_steps(other)}):
        if step <= last:
            all_differences += _compare_checkpoints(
                checkpoint_folder(run, step), checkpoint_folder(other, step), step, names
            )
    return sorted(all_differences, key=lambda difference: difference.step)


def _compare_metrics(run: Path, other: Path, last: int) -> Iterator[RunDifference]:
    lines = [
        {row.step: _timeless(asdict(row)) for row in read_metrics(path / FILE_NAME) if row.step <= last}
        for path in (run, other)
    ]
    for step in sorted(lines[0].keys() | lines[1].keys()):
        yield from (
            RunDifference(step, text) for text in _compare_values(lines[0].get(step), lines[1].get(step), "metrics")
        )


def _compare_checkpoints(folder: Path, other: Path, step: int, names: Sequence[str]) -> Iterator[RunDifference]:
    for file, what in _FILES.items():
        if (folder / file).exists() or (other / file).exists():
            yield from (
                RunDifference(step, text) for text in _compare_tensors(folder / file, other / file, what, names)
            )
    first, second = (_timeless(read_state(path)) for path in (folder, other))
    yield from (RunDifference(step, text) for text in _compare_values(first, second, "state"))


def _compare_tensors(path: Path, other: Path, what: str, names: Sequence[str]) -> Iterator[str]:
    if not (path.exists() and other.exists()):
        yield f"the {what} are saved in one of the runs only"
        return
    first, second = load_tensors(path), load_tensors(other)
    different = [
        name for name in sorted(first.keys() | second.keys()) if not _is_same(first.get(name), second.get(name))
    ]
    if different:
        name, more = different[0], len(different) - 1
        shown = _address(name, names) if path.name == OPTIMIZER else name
        yield f"{what} of {shown}{f' and of {more} other tensors' if more else ''}{_distance_text(first, second, name)}"


def _is_same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None or (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (first, second)))


def _distance_text(first: Mapping[str, Tensor], second: Mapping[str, Tensor], name: str) -> str:
    if name not in first or name not in second or first[name].shape != second[name].shape:
        return ""
    return f", by up to {(first[name].double() - second[name].double()).abs().max().item():.2g}"


def _compare_values(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None, what: str) -> Iterator[str]:
    """Yield one sentence if values differ: the first key, the number of others, and both values of the first key."""
    if first is None or second is None:
        yield f"{what} are in one of the runs only"
        return
    ours, theirs = flatten_keys(first), flatten_keys(second)
    different = [key for key in sorted(ours | theirs) if ours.get(key) != theirs.get(key)]
    if different:
        key, more = different[0], len(different) - 1
        values = [json.dumps(tree.get(key)) for tree in (ours, theirs)]
        # Random states are too long to show.
        shown = f", {values[0]} undisturbed and {values[1]} after the kills" if max(map(len, values)) <= 60 else ""
        yield f"{what}: {key}{f' and {more} more' if more else ''}{shown}"


def _timeless(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _timeless(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if "second" not in key
    }


def _address(name: str, names: Sequence[str]) -> str:
    """Replace the index in the name of an optimizer tensor by the address of its weight."""
    index, _, key = name.partition(".")
    return f"{names[int(index)]} ({key})" if index.isdecimal() and int(index) < len(names) else name


def gradient_distance(run: Path, other: Path, names: Sequence[str]) -> tuple[float, str]:
    """Return the largest relative distance between the gradients of two runs after one update, and its place.

    The distance of a tensor is max|a-b| / max|b|, that of the losses |a-b| / |b|. A gradient below a thousandth of the
    largest one is compared as if it had that size.

    Args:
        run, other: run directories with a checkpoint of step 1.
        names: addresses of the weights, in the order of the optimizer.
    """
    (ours, our_loss), (theirs, their_loss) = (_first_update(path, names) for path in (run, other))
    floor = _FLOOR * max(map(_largest, theirs.values()), default=0.0)
    distances = {"the loss": abs(our_loss - their_loss) / max(abs(their_loss), _TINY)}
    for weight, gradient in theirs.items():
        apart = _largest(ours[weight] - gradient) if weight in ours else math.inf
        distances[f"the gradient of {weight}"] = apart / max(_largest(gradient), floor, _TINY)
    where = max(distances, key=distances.__getitem__)
    return distances[where], where


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def _first_update(run: Path, names: Sequence[str]) -> tuple[dict[str, Tensor], float]:
    """Return the gradients of the first update by weight address, and the mean loss."""
    folder = checkpoint_folder(run, 1)
    tensors = {name.rpartition("."): tensor for name, tensor in load_tensors(folder / OPTIMIZER).items()}
    gradients = {names[int(index)]: tensor for (index, _, key), tensor in tensors.items() if key in _GRADIENTS}
    rows = [row for row in read_metrics(run / FILE_NAME) if row.step == 1]
    tally = read_state(folder)["tally"]
    return gradients, rows[0].loss if rows else tally["loss_sum"] / max(1, tally["loss_count"])
