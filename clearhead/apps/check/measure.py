"""The differences of two traces, submodule by submodule in the order of the computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from clearhead.apps.check.trace import Trace
from clearhead.base.printing import Printed
from clearhead.base.tensors import relative_error


@dataclass(frozen=True, repr=False)
class Comparison(Printed):
    """The difference of two models at one place.

    Args:
        name: for display.
        path: of our submodule, or of the layer.
        error: the relative difference.
        is_layer: whether this is the output of a layer.
    """

    name: str
    path: str
    error: float
    is_layer: bool = False


def compare_layouts(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error of two tensors that may differ in layout, such as heads before tokens."""
    return relative_error(actual, _reshaped(expected, actual))


def compare_traces(ours: Trace, theirs: Trace) -> list[Comparison]:
    """Compare the submodules, layers and outputs that both traces have."""
    found = [
        Comparison(
            path if count == 0 else f"{path} (run {count + 1})",
            path,
            compare_layouts(value, theirs.parts[path, count]),
        )
        for (path, count), value in ours.parts.items()
        if (path, count) in theirs.parts and _have_one_shape(value, theirs.parts[path, count])
    ]
    for name, value in ours.layers.items():
        if name not in theirs.layers:
            continue
        side = name.split()[0]
        # Their last state is the output of the stack, or in a few classes its input to the final norm.
        is_last = f"{side} {int(name.split()[1]) + 1}" not in theirs.layers
        ends = [value, ours.layers[f"{side} end"]] if is_last and f"{side} end" in ours.layers else [value]
        found.append(
            Comparison(
                _layer(name), name, min(compare_layouts(end, theirs.layers[name]) for end in ends), is_layer=True
            )
        )
    if ours.outputs is not None and theirs.outputs is not None:
        found.append(
            Comparison("outputs", "outputs", compare_layouts(_squeezed(ours.outputs, theirs.outputs), theirs.outputs))
        )
    return found


def first_divergence(found: Sequence[Comparison], tolerance: float) -> Comparison | None:
    """Return the first place where two models differ; None: they agree."""
    return next((point for point in found if not point.error <= tolerance), None)


def _layer(name: str) -> str:
    side, number = name.split()
    return f"{side} embedding" if number == "0" else f"{side} layer {int(number) - 1}"


def _squeezed(found: Tensor, expected: Tensor) -> Tensor:
    """Drop the last axis of a single score per token, which some classes do not have."""
    return found[..., 0] if found.dim() == expected.dim() + 1 and found.shape[-1] == 1 else found


def _reshaped(value: Tensor, like: Tensor) -> Tensor:
    """Undo differences of layout: heads before tokens, flattened rows, one row for all."""
    if value.dim() == 4 and value.transpose(1, 2).shape == like.shape != value.shape:
        return value.transpose(1, 2)
    if value.dim() == 2 and value.numel() == like.numel() and value.shape[-1] == like.shape[-1]:
        return value.view(like.shape)
    if value.dim() == like.dim() and value.shape[1:] == like.shape[1:] and 1 in (len(value), len(like)):
        return value.expand_as(like) if len(value) == 1 else value[:1]
    return value


def _have_one_shape(found: Tensor, expected: Tensor) -> bool:
    return _reshaped(expected, found).shape == found.shape
