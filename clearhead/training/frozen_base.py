"""Frozen base weights of a LoRA run, in the 16 bits of their checkpoint; low-rank matrices and vectors are fp32."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clearhead.core import Transformer, build
from clearhead.fast.stored import IN_16_BITS, StorageFormat, keep_16_bits, store
from clearhead.spec import Model
from clearhead.spec.registry import Part
from clearhead.spec.tasks.record import TaskRecord
from clearhead.spec.traversal import walk
from clearhead.training.init_from import InitialModel, is_copied
from clearhead.training.runfile.sections import RunFile


def choose_base_formats(
    run_file: RunFile, model: Model, initial: InitialModel | None, record: TaskRecord, device: torch.device
) -> dict[str, StorageFormat]:
    """Return the 16-bit format of each frozen matrix of a new run, by the address of its module.

    The matrices are those that the initial model has in 16 bits. There are none for a run without LoRA, a small model,
    a compiled run, or a device other than a CPU.

    Args:
        run_file: the checked run file.
        model: the spec of the model to train.
        initial: the initial model. None means that the run starts from scratch.
        record: the record of the task to train.
        device: the device for training.
    """
    if run_file.lora is None or initial is None or device.type != "cpu" or run_file.train.compile is True:
        return {}
    module = build(model, device="meta")
    dtypes = dict.fromkeys(module.state_dict(), torch.float32)
    for address, dtype in initial.dtypes().items():
        if is_copied(address, model, initial, record):
            dtypes[address] = dtype
    return keep_16_bits(module, dtypes)


def build_base(model: Model, formats: Mapping[str, StorageFormat], device: torch.device) -> Transformer:
    """Build a model whose frozen matrices are stored in 16 bits, with the random numbers of `build` for all others.

    Args:
        model: the spec of the model.
        formats: the formats of the frozen matrices by the addresses of their modules; their values are arbitrary.
        device: the device of the weights.
    """
    with _SharedMemory(_find_replaced_shapes(model, formats)):
        module = build(model, device=device)
    return store(module, formats)


def _find_replaced_shapes(model: Model, formats: Mapping[str, StorageFormat]) -> set[tuple[int, ...]]:
    """Return the shapes of the weights whose initial values are never used: every weight of such a shape is stored."""
    if any(isinstance(node, Part) for _, node in walk(model)):
        return set()  # a custom module may use an uninitialized tensor otherwise
    module = build(model, device="meta")
    stored, others = set[tuple[int, ...]](), set[tuple[int, ...]]()
    for address, tensor in (*module.named_parameters(), *module.named_buffers()):
        is_stored = address.removesuffix(".weight") in formats and address.endswith(".weight")
        (stored if is_stored else others).add(tuple(tensor.shape))
    return stored - others


class _SharedMemory(TorchFunctionMode):
    """Gives all uninitialized tensors of some shapes the same memory, since their values are replaced later.

    A random initialization then draws the same numbers as always, but takes the memory of one matrix.

    Args:
        shapes: the shapes of these tensors.
    """

    def __init__(self, shapes: Collection[tuple[int, ...]]) -> None:
        super().__init__()
        self._shapes = shapes
        self._memory: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the shared memory for `torch.empty` with one of the shapes; call all other functions."""
        kwargs = kwargs or {}
        if func is not torch.empty or kwargs.get("dtype") is not None:
            return func(*args, **kwargs)
        shape = tuple(args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
        if shape not in self._shapes:
            return func(*args, **kwargs)
        if self._memory is None:
            self._memory = func(max(map(math.prod, self._shapes)), **kwargs)
        return self._memory[: math.prod(shape)].view(shape)


def formats_to_text(formats: Mapping[str, StorageFormat]) -> str:
    """Return formats by address as a text that a checkpoint stores."""
    return " ".join(f"{address}:{kind.name}" for address, kind in formats.items())


def formats_from_text(text: str) -> dict[str, StorageFormat]:
    """Return the formats that `formats_to_text` wrote."""
    kinds = {kind.name: kind for kind in IN_16_BITS.values()}
    pairs = (entry.rpartition(":") for entry in text.split())
    return {address: kinds[name] for address, _, name in pairs if name in kinds}
