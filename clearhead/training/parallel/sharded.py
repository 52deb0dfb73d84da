"""Models that are spread over the processes: each holds a part of every weight, of its gradient and of its moments."""

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

# The name that PyTorch gives to the one file into which it puts the parts of all processes together.
_WHOLE = "model-00001-of-00001.safetensors"


class ShardedEngine(TrainingEngine[RankBatch[BatchT]]):
    """PyTorch's FSDP2: weights are gathered layer by layer, and gradients are added up where their weights are kept.

    Args:
        module: the module to train; the first process's weights are sent to the others, which may have none (on meta).
        loss: gives, for a batch, the summed loss and the number of labels.
        processes: that share the module.
        device: of each process's part.
        precision: "bf16" gathers weights in 16 bits; gradients are added up in 32.

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
                # Sums, because the loop divides by the labels of all processes; gloo knows no averages either.
                submodule.set_gradient_divide_factor(1.0)
                submodule.set_force_sum_reduction_for_comms(True)
        unsaved = {path: buffer for path, buffer in module.named_buffers() if path not in module.state_dict()}
        module.to_empty(device=device)
        for path, buffer in unsaved.items():  # of own parts: computed, and in no state
            owner, _, name = path.rpartition(".")
            module.get_submodule(owner)._buffers[name] = buffer.to(device)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(module, weights, options=options)

    def loss(self, batch: RankBatch[BatchT], *, is_last: bool) -> tuple[Tensor, int]:
        """Return the summed loss of a share, and the number of its labels; arguments as of `Engine.loss`."""
        assert isinstance(self._root, FSDPModule)
        self._root.set_requires_gradient_sync(is_last)
        loss: tuple[Tensor, int] = self._root(batch)
        if not torch.is_grad_enabled():
            # No backward pass follows, after which the module holds the parts again that an optimizer knows.
            self._root.reshard()
        return loss

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Have whole weights in the module, for calls that do not come from `loss`; layers gather their own."""
        assert isinstance(self._root, FSDPModule)
        self._root.unshard()
        try:
            yield
        finally:
            self._root.reshard()

    def place_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return whole weights as the module holds them."""
        state = self.module.state_dict()
        return {
            name: distribute_tensor(value, self._mesh, [Shard(0)]) if isinstance(state[name], DTensor) else value
            for name, value in weights.items()
        }

    def save(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write named tensors to a safetensors file, each process its parts; the first one puts them together."""
        path = Path(self._processes.broadcast(str(path)))
        if not tensors:  # of an optimizer before its first step
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
                raise cause from error  # which the writer of a checkpoint puts into words
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
        """Take part in the writing of files by the first process, which names them."""
        for tensors in files:
            self.save(Path(), tensors)

    def load_checkpoint(self, folder: Path) -> Checkpoint:
        """Load this process's shards of a checkpoint, which may have been written by any number of processes.

        Raises:
            InputError: it is damaged, its format is not supported, or another process reads another one.
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
        """Read this process's shards of the named tensors of a file of a checkpoint."""
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
    """A folder with the file that is asked for alone."""

    def ls(self, path: object) -> list[str]:
        """Return the file."""
        return [str(path)]


def _find_missing_values(folder: Path, tensors: Mapping[str, Tensor], num_processes: int) -> str | None:
    """Return a phrase about a tensor that lacks values of some process; None if the consolidated file is complete.

    Args:
        folder: with the consolidated file, and the shards of all processes.
        tensors: the plan: shards of this process, which know the shape of the whole.
        num_processes: number of processes that wrote shards.
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
    """Return the shape of each tensor in a safetensors file, and the tensors without an axis."""
    with safe_open(path, framework="pt") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return shapes, {name: file.get_tensor(name) for name, shape in shapes.items() if not shape}


def _make_scalars(path: Path, names: list[str]) -> None:
    """Take the only axis from tensors of a safetensors file: PyTorch would put zeros together for those without one."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for name in names:
            header[name]["shape"] = []
        file.seek(8)
        file.write(json.dumps(header).encode().ljust(size))


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers that are gathered one by one; those that run at several depths stay with the rest."""
    stacks = [submodule for submodule in module.modules() if isinstance(submodule, Stack)]
    return [
        layer
        for stack in stacks
        if len(set(stack.order)) == len(stack.order)
        for layer in stack.layers
        if isinstance(layer, Layer)
    ]
