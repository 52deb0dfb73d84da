"""Training engine for sharded models: each process holds a shard of every weight, gradient and moment."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, zeros

from clearhead.base.errors import InputError, RunFailure
from clearhead.checkpoints.runs.checkpoint import UNTOUCHED, Checkpoint, load_checkpoint
from clearhead.checkpoints.runs.manifest import MANIFEST, sha256_of
from clearhead.core.stack import Layer, Stack
from clearhead.data.batches.base import BatchT, Loss
from clearhead.training.parallel.engines import BatchLoss, RankBatch, TrainingEngine
from clearhead.training.parallel.processes import Processes

# The name that PyTorch gives to the file into which it consolidates the shards of all processes.
_WHOLE = "model-00001-of-00001.safetensors"


class ShardedEngine(TrainingEngine[RankBatch[BatchT]]):
    """Engine with PyTorch's FSDP2: weights are gathered layer by layer, and gradients are added up on their shards.

    Args:
        module: the module to train; the weights of the first process are distributed, and the other processes may hold
            the module on the meta device.
        loss: a function that returns the summed loss of a batch and the number of its labels.
        processes: the processes that train together.
        device: the device of the shard of this process.
        precision: the precision of the computation; "bf16" gathers weights in 16 bits. Gradients are added up in 32
            bits.

    Source: arXiv 2304.11277.
    """

    is_sharded: ClassVar[bool] = True

    def __init__(
        self, module: nn.Module, loss: Loss[BatchT], processes: Processes, *, device: torch.device, precision: str
    ) -> None:
        super().__init__(module, loss)
        self._processes = processes
        self._mesh = init_device_mesh(device.type, (processes.size,))
        self._root = BatchLoss(module, loss)
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if precision == "bf16" else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        weights = dict(module.state_dict()) if processes.is_first else {}
        for submodule in [*_layers(module), self._root]:
            fully_shard(submodule, mesh=self._mesh, mp_policy=policy)
        for submodule in self._root.modules():
            if isinstance(submodule, FSDPModule):
                # Sums, because the loop divides by the labels of all processes; gloo does not support averages.
                submodule.set_gradient_divide_factor(1.0)
                submodule.set_force_sum_reduction_for_comms(True)
        unsaved = {path: buffer for path, buffer in module.named_buffers() if path not in module.state_dict()}
        module.to_empty(device=device)
        for path, buffer in unsaved.items():  # buffers of custom modules that are computed, not saved
            owner, _, name = path.rpartition(".")
            module.get_submodule(owner)._buffers[name] = buffer.to(device)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(module, weights, options=options)

    def loss(self, batch: RankBatch[BatchT], *, is_last: bool) -> tuple[Tensor, int]:
        """Return the summed loss of the rows of this process, and the number of their labels."""
        assert isinstance(self._root, FSDPModule)
        self._root.set_requires_gradient_sync(is_last)
        loss: tuple[Tensor, int] = self._root(batch)
        if not torch.is_grad_enabled():
            # Without a backward pass, which would reshard the module, restore the shards that the optimizer uses.
            self._root.reshard()
        return loss

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Return a context manager in which the module has whole weights; layers gather theirs when they run."""
        assert isinstance(self._root, FSDPModule)
        self._root.unshard()
        try:
            yield
        finally:
            self._root.reshard()

    def place_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return whole weights as shards of this process, like the weights of the module."""
        state = self.module.state_dict()
        return {
            name: distribute_tensor(value, self._mesh, [Shard(0)]) if isinstance(state[name], DTensor) else value
            for name, value in weights.items()
        }

    def save(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write named tensors to a safetensors file: each process writes shards, and the first joins them."""
        path = Path(self._processes.broadcast(str(path)))
        if not tensors:  # the optimizer before its first step
            if self._processes.is_first:
                super().save(path, tensors)
            return
        folder = path.with_suffix("")
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
        scalars = [name for name, value in tensors.items() if not value.ndim]
        try:
            save({name: value.reshape(value.shape or 1) for name, value in tensors.items()}, storage_writer=writer)
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            if self._processes.is_first and isinstance(cause, OSError):
                raise cause from error  # the caller turns it into a message
            raise RunFailure(f"{path} could not be saved: {cause}") from error
        fault = self._processes.broadcast(
            _find_missing_values(folder, tensors, self._processes.size) if self._processes.is_first else None
        )
        if fault is not None:
            raise RunFailure(f"{path} could not be saved: {fault}; {UNTOUCHED}")
        if self._processes.is_first:
            (folder / _WHOLE).rename(path)
            shutil.rmtree(folder)
            _make_scalars(path, scalars)

    def join_save(self, files: Sequence[Mapping[str, Tensor]]) -> None:
        """Write the shards of this process while the first process saves `files` and sends the paths."""
        for tensors in files:
            self.save(Path(), tensors)

    def load_checkpoint(self, folder: Path) -> Checkpoint:
        """Load the shards of this process from a checkpoint that any number of processes may have written.

        Raises:
            InputError: the checkpoint is damaged, its format is not supported, or another process reads another one.
        """
        manifest = folder / MANIFEST
        digests = self._processes.all_gather(sha256_of(manifest) if manifest.exists() else "missing")
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise InputError(
                    f"process {rank} reads another checkpoint in {folder} than process 0: name a folder that all "
                    "machines share (train.run=...)"
                )
        return load_checkpoint(folder, load=self._load)

    def _load(self, path: Path) -> dict[str, Tensor]:
        """Read the shards of this process from a file of a checkpoint."""
        shapes, scalars = _read_shapes(path)
        parts: dict[str, Tensor] = {
            name: zeros(*shape, device_mesh=self._mesh, placements=[Shard(0)])
            for name, shape in shapes.items()
            if shape
        }
        reader = HuggingFaceStorageReader(str(path))
        reader.fs = _SingleFile()
        if parts:
            load(parts, storage_reader=reader)
        return parts | scalars


class _SingleFile(FileSystem):
    """A file system that shows a single file as if it were a folder with this file."""

    def ls(self, path: object) -> list[str]:
        """Return the path itself as the only entry."""
        return [str(path)]


def _find_missing_values(folder: Path, tensors: Mapping[str, Tensor], num_processes: int) -> str | None:
    """Return a phrase about a tensor that lacks values of a process; None if the consolidated file is complete.

    Args:
        folder: the folder with the consolidated file and the shards of all processes.
        tensors: the shards of this process by name; they have the shapes of the whole tensors.
        num_processes: the number of processes that wrote shards.
    """
    shards, numbers = sorted(folder.glob("sharded/*.safetensors")), Counter[str]()
    for shard in shards:
        numbers.update({name: math.prod(shape) for name, shape in _read_shapes(shard)[0].items()})
    whole, _ = _read_shapes(folder / _WHOLE)
    for name, tensor in tensors.items():
        shape = list(tensor.shape) or [1]
        if whole.get(name) != shape or numbers[name] != math.prod(shape):
            return (
                f"the {len(shards)} files of {num_processes} processes hold {numbers[name]:,} of {math.prod(shape):,} "
                f"values of '{name}'; name a run directory that all machines share"
            )
    return None


def _read_shapes(path: Path) -> tuple[dict[str, list[int]], dict[str, Tensor]]:
    """Return the shapes of the tensors in a safetensors file, and the scalar tensors themselves."""
    with safe_open(path, framework="pt") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return shapes, {name: file.get_tensor(name) for name, shape in shapes.items() if not shape}


def _make_scalars(path: Path, names: list[str]) -> None:
    """Make one-element tensors of a safetensors file scalar again; PyTorch would consolidate scalars to zeros."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for name in names:
            header[name]["shape"] = []
        file.seek(8)
        file.write(json.dumps(header).encode().ljust(size))


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers that are gathered one by one; layers that run at several depths are not among them."""
    stacks = [submodule for submodule in module.modules() if isinstance(submodule, Stack)]
    return [
        layer
        for stack in stacks
        if len(set(stack.order)) == len(stack.order)
        for layer in stack.layers
        if isinstance(layer, Layer)
    ]
