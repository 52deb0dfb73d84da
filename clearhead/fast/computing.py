"""Replicas that compute in another dtype, with one converted matrix at a time in place of a second copy of all."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from clearhead.core import Transformer
from clearhead.fast.replica import override, replica
from clearhead.fast.stored import MIXINS, Entry, Format, Stored


def computing_in(module: Transformer, dtype: torch.dtype) -> Transformer:
    """Return a replica that computes in a dtype; each matrix is converted when it is read and dropped afterwards.

    Vectors, such as those of norms, are converted once.

    Args:
        module: the model; it stays unchanged.
        dtype: fp64, fp32 or bf16.
    """
    twin, known = replica(module), dict[int, Tensor]()

    def convert(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        if id(tensor) not in known:
            copied = tensor.detach().to(dtype)
            known[id(tensor)] = nn.Parameter(copied, False) if isinstance(tensor, nn.Parameter) else copied
        return known[id(tensor)]

    for part in list(twin.modules()):
        entries = _convert_when_read(part, dtype)
        for kind in ("_parameters", "_buffers"):
            state = vars(part)[kind]
            vars(part)[kind] = {name: x if name in entries else convert(x) for name, x in state.items()}
    return twin


def plain_format(weight: Tensor) -> Format:
    """Return the format of a matrix that is stored as it is."""
    entry = Entry("weight", weight.dtype, weight.dim())
    return Format("plain", (entry,), lambda matrix: (matrix,), lambda matrix: matrix, is_exact=True)


def _convert_when_read(part: nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Let a part of a replica convert its matrix when it reads it; return the names of the stored tensors."""
    if not isinstance(part, Stored):
        mixin = next((mixin for plain, mixin in MIXINS.items() if isinstance(part, plain)), None)
        weight = vars(part)["_parameters"].get("weight")
        if mixin is None or weight is None or weight.dtype == dtype:
            return ()
        stored = override(part, mixin)
        stored.format = plain_format(weight)
    else:
        stored = part
    kind = stored.format
    stored.format = replace(kind, widen=lambda *entries: kind.widen(*entries).to(dtype))
    return kind.names
