"""Replicas that compute in another dtype: each matrix is converted when read, so that no second copy is kept."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from clearhead.core import Transformer
from clearhead.fast.replica import override, replica
from clearhead.fast.stored import MIXINS, FormatEntry, StorageFormat, Stored


def replica_in_dtype(module: Transformer, dtype: torch.dtype) -> Transformer:
    """Return a replica that computes in another dtype; each matrix is converted when read and dropped afterwards.

    Vectors, such as the weights of norms, are converted once.

    Args:
        module: the model, which stays unchanged.
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

    for submodule in list(twin.modules()):
        entries = _convert_when_read(submodule, dtype)
        for kind in ("_parameters", "_buffers"):
            state = vars(submodule)[kind]
            vars(submodule)[kind] = {name: x if name in entries else convert(x) for name, x in state.items()}
    return twin


def plain_format(weight: Tensor) -> StorageFormat:
    """Return the storage format that holds a matrix unchanged, in its own dtype."""
    entry = FormatEntry("weight", weight.dtype, weight.dim())
    return StorageFormat("plain", (entry,), lambda matrix: (matrix,), lambda matrix: matrix, is_exact=True)


def _convert_when_read(submodule: nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Make a submodule of a replica convert its matrix at each read; return the names of the stored tensors."""
    if not isinstance(submodule, Stored):
        mixin = next((mixin for plain, mixin in MIXINS.items() if isinstance(submodule, plain)), None)
        weight = vars(submodule)["_parameters"].get("weight")
        if mixin is None or weight is None or weight.dtype == dtype:
            return ()
        stored = override(submodule, mixin)
        stored.format = plain_format(weight)
    else:
        stored = submodule
    kind = stored.format
    stored.format = replace(kind, widen=lambda *entries: kind.widen(*entries).to(dtype))
    return kind.names
