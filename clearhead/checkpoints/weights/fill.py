"""Tensors into the slots of a module: every slot filled, every tensor used, or one report of all that is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from clearhead.base.errors import InputError, nearest
from clearhead.checkpoints.weights.files import MOST_SHOWN
from clearhead.core import Transformer, build
from clearhead.fast.int8 import SCALE, dequantized, holds_int8, to_int8
from clearhead.spec import Model


def fill(module: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Put named tensors into a module, which may be on the meta device.

    Args:
        module: whose parameters are filled, in place.
        tensors: one for each entry of its state, by the path of its owner.
        source: where they come from, for the report.

    Raises:
        InputError: slots without tensor, tensors without slot, or shapes that differ, all in one report.
    """
    slots = module.state_dict()
    faults = [f"'{name}' is missing" for name in slots if name not in tensors]
    strangers = [name for name in tensors if name not in slots]
    faults += [f"'{name}' has no place in the model{nearest(name, slots)}" for name in strangers[:MOST_SHOWN]]
    if len(strangers) > MOST_SHOWN:
        faults.append(f"{len(strangers) - MOST_SHOWN} more have no place in the model")
    faults += [
        f"'{name}' has the shape {list(tensors[name].shape)}, the model needs {list(slot.shape)}"
        for name, slot in slots.items()
        if name in tensors and tensors[name].shape != slot.shape
    ]
    if faults:
        raise InputError.from_faults(faults, subject=source)
    module.load_state_dict(dict(tensors), strict=True, assign=True)


def filled(model: Model, tensors: Mapping[str, Tensor], *, source: str, keep_int8: bool = False) -> Transformer:
    """Return a module of tensors from a file, which must fit as they are there.

    Args:
        model: its spec.
        tensors: of dtypes that weights have, one for each entry of its state.
        source: where they come from, for the report.
        keep_int8: whether weights in 8 bits stay so; otherwise they are fp32.

    Raises:
        InputError: as for `fill`.
    """
    module = build(model, device="meta")
    in_int8 = holds_int8(tensors)
    fill(to_int8(module) if in_int8 else module, tensors, source=source)
    return built(model, dequantized(module.state_dict())) if in_int8 and not keep_int8 else module


def refuse_nan(module: nn.Module, name: str) -> None:
    """Refuse weights that are not numbers, with which every output would be one more.

    Args:
        module: whose weights are read once.
        name: of the model, for the message.

    Raises:
        InputError: a weight holds NaN, or a matrix or its scales in 8 bits an infinite number.
    """
    for address, weight in itertools.chain(module.named_parameters(), module.named_buffers()):
        # The sum of a tensor tells in one pass whether a closer look is needed.
        if weight.is_floating_point() and not torch.isfinite(weight.detach().sum(dtype=torch.float32)):
            is_matrix = weight.dim() > 1 or address.endswith(SCALE)
            count = int((~torch.isfinite(weight)).sum() if is_matrix else torch.isnan(weight).sum())
            if count:
                raise InputError(
                    f"{name}: {count:,} of {weight.numel():,} numbers in {address} are NaN or infinite, so the "
                    "training of this model diverged; take an earlier checkpoint, as in RUN@step-N, or train with a "
                    "smaller learning_rate"
                )


def built(model: Model, tensors: Mapping[str, Tensor], *, training: bool = False) -> Transformer:
    """Return a module of tensors that are known to fit; they become its own and are not copied.

    Args:
        model: its spec.
        tensors: one for each entry of its state, by address.
        training: whether it is in training mode.
    """
    made = build(model, device="meta")
    if holds_int8(tensors):
        to_int8(made)
    made.load_state_dict(dict(tensors), strict=True, assign=True)
    return made.train(training)
