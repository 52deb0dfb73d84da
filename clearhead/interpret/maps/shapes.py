"""Compute the shapes of all activations from a model's spec, on the meta device, without allocating memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead import spec
from clearhead.core import Transformer, build
from clearhead.interpret.maps.hook_points import Captured, Record, capture

Axis = int | str
# Two calls with different sizes: an axis that differs between them gets the name of the size that it equals.
_CALLS = ({"batch": 2, "source": 5, "target": 7}, {"batch": 3, "source": 11, "target": 13})


@dataclass(frozen=True)
class ActivationShape:
    """Shape of an activation.

    Args:
        address: address of the activation.
        shape: sizes of the axes. Sizes of the model are numbers, and sizes of a call are names. The names are "batch";
            "tokens", or "source" and "target" with two stacks; and "queries" and "keys" of a matrix. The name
            "batch*tokens" is a merged axis. An axis "source|target" is the source in some computations of the
            activation, and the target in others.
        records: number of times that one call of the model computes the activation. It is more than one if several
            depths share a layer, or both stacks share a table.
        is_identity: True if the module is an identity, such as an absent norm.
    """

    address: str
    shape: tuple[Axis, ...]
    records: int
    is_identity: bool


def activation_shapes(model: spec.Model) -> list[ActivationShape]:
    """Return the shape of every activation of a call without padding and cache, in the order of `addresses()`.

    Activations inside experts are left out: their sizes depend on the routing of the tokens.

    Raises:
        InputError: the spec is inconsistent; the message lists every fault.
    """
    module = build(model, device="meta").eval()
    first, second = (_capture_shapes(module, sizes) for sizes in _CALLS)
    names = _axis_names(has_two_stacks=model.encoder is not None and model.decoder is not None)
    parts = dict(module.named_modules())
    return [
        ActivationShape(
            address,
            _merge_shapes([_name_axes(*pair, names) for pair in zip(records, second[address], strict=True)]),
            len(records),
            isinstance(parts.get(address), nn.Identity),
        )
        for address, records in first.items()
        if records
    ]


class _MetaValues(TorchDispatchMode):
    """Dispatch mode that lets a model read values on the meta device: every number is 0.

    So checks of values pass, and no token chooses an expert; neither changes the shape of an activation.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.long)
        return func(*args, **(kwargs or {}))


def _capture_shapes(module: Transformer, sizes: Mapping[str, int]) -> Captured:
    source, target = (
        torch.zeros(sizes["batch"], sizes[side], dtype=torch.long, device="meta") for side in ("source", "target")
    )
    has_two_stacks = module.encoder is not None and module.decoder is not None
    with torch.no_grad(), _MetaValues(), capture(module, "**") as seen:  # type: ignore[no-untyped-call]
        module(source, target if has_two_stacks else None)
    return seen


def _axis_names(*, has_two_stacks: bool) -> dict[tuple[int, int], str]:
    """Return a dictionary from the pair of sizes of an axis in the two calls to the name of the axis."""
    first, second = _CALLS
    shown = {"batch": "batch", "source": "source" if has_two_stacks else "tokens", "target": "target"}
    names = {(first[name], second[name]): text for name, text in shown.items()}
    for side in ("source", "target"):
        pair = (first["batch"] * first[side], second["batch"] * second[side])
        names[pair] = f"batch*{shown[side]}"
    return names


def _name_axes(first: Record, second: Record, names: Mapping[tuple[int, int], str]) -> tuple[Axis, ...]:
    pairs = zip(first.tensor.shape, second.tensor.shape, strict=True)
    shape: list[Axis] = [
        first_size if first_size == second_size else names[first_size, second_size] for first_size, second_size in pairs
    ]
    tokens = {"tokens", "source", "target"}
    if len(shape) > 1 and shape[-1] in tokens and shape[-2] in tokens:
        shape[-2:] = ["queries", "keys"]
    return tuple(shape)


def _merge_shapes(shapes: Sequence[tuple[Axis, ...]]) -> tuple[Axis, ...]:
    """Merge the equally long shapes of one activation's records; sizes that differ are joined, such as "512|768"."""
    choices = (list(dict.fromkeys(axes)) for axes in zip(*shapes, strict=True))
    return tuple(axes[0] if len(axes) == 1 else "|".join(map(str, axes)) for axes in choices)
