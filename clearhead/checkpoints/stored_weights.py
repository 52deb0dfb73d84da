"""Weights of a model on disk or in memory, read a few rows at a time.

A vector of n numbers has n rows of one number. A stack of matrices counts the rows of all matrices.
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.checkpoints.hf.files.quantization import PackedFiles
from clearhead.checkpoints.hf.files.tensor_files import TensorFiles
from clearhead.checkpoints.hf.loading import OpenCheckpoint, open_checkpoint
from clearhead.checkpoints.reference import SPEC_FILE, ModelReference
from clearhead.checkpoints.runs.directory import find_files
from clearhead.checkpoints.weights.lora import LOW_RANK
from clearhead.core import Transformer
from clearhead.fast.stored import StorageFormat, formats_of, widen_weights
from clearhead.spec import Model

Rows = Float[Tensor, "rows columns"]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of rows and columns of a weight: [*rows, columns], or one column for a vector."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (math.prod(shape), 1)


class StoredWeights(ABC):
    """Weights of a model: the shape of each weight by address, and access to their rows.

    Args:
        name: the reference of the model, for messages.
        model: the spec of the model.
        shapes: the shape of each weight by address.
    """

    def __init__(self, name: str, model: Model, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.name: str = name
        self.model: Model = model
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    @abstractmethod
    def read_rows(self, address: str, rows: range) -> Rows:
        """Return the given rows of a weight in fp32; low-rank matrices are merged and quantized ones dequantized."""


class ModuleWeights(StoredWeights):
    """Weights of a module in memory."""

    def __init__(self, name: str, module: Transformer) -> None:
        self._tensors: dict[str, Tensor] = dict(widen_weights(module.state_dict()))
        super().__init__(name, module.spec, {address: tuple(tensor.shape) for address, tensor in self._tensors.items()})

    def read_rows(self, address: str, rows: range) -> Rows:
        """Return the given rows of a weight of the module in float32."""
        matrix = self._tensors[address].detach().reshape(matrix_shape(self.shapes[address]))
        return matrix[rows.start : rows.stop].float().cpu()


class FileWeights(StoredWeights):
    """Weights in the safetensors file of a run or a saved model."""

    def __init__(self, name: str, model: Model, path: Path) -> None:
        self._files: TensorFiles = TensorFiles(path.parent, path.name)
        self._formats: Mapping[str, StorageFormat] = formats_of(self._files)
        shapes = {}
        for address, header in self._files.headers.items():
            owner, _, last = address.rpartition(".")
            names = self._formats[owner].names if owner in self._formats else ()
            if last not in (*LOW_RANK, *names):
                shapes[address] = header.shape
            elif last in names[:1]:
                shapes[f"{owner}.weight"] = (header.shape[0], self._widen(owner, range(1)).shape[-1])
        super().__init__(name, model, shapes)

    def read_rows(self, address: str, rows: range) -> Rows:
        """Return the given rows of a weight from the safetensors file."""
        files, owner = self._files, address.removesuffix(".weight")
        matrix = self._widen(owner, rows) if owner in self._formats else files.read_rows(address, rows).float()
        down, up, scale = (f"{owner}.{last}" for last in LOW_RANK)
        if up in files and address != owner:
            rank = range(files.headers[down].shape[0])
            product = files.read_rows(up, rows).double() @ files.read_rows(down, rank).double()
            matrix = (matrix.double() + float(files.read_rows(scale, range(1))) * product).float()
        return matrix.view(len(rows), -1)

    def _widen(self, owner: str, rows: range) -> Tensor:
        kind = self._formats[owner]
        return kind.widen(*(self._files.read_rows(f"{owner}.{name}", rows) for name in kind.names))


class CheckpointWeights(StoredWeights):
    """Weights in the files of a Hugging Face checkpoint.

    If the rule of a weight only moves rows, the stored rows are read directly. Otherwise the stored tensor is mapped
    for each block of rows. Tensors of a rule that copies stay in memory until the next weight is read.
    """

    def __init__(self, name: str, checkpoint: OpenCheckpoint) -> None:
        self._file_tensors = checkpoint.file_tensors
        self._sources = {address: source for source in checkpoint.sources for address in source.bound.ours}
        self._pooled: Mapping[str, Tensor] = (
            {} if checkpoint.loaded.pooling is None else checkpoint.loaded.pooling.tensors
        )
        self._row_numbers: dict[str, Tensor | None] = {}
        self._whole_tensors: dict[str, Tensor] = {}
        module = checkpoint.loaded.module
        super().__init__(
            name, module.spec, {address: tuple(tensor.shape) for address, tensor in module.state_dict().items()}
        )

    def read_rows(self, address: str, rows: range) -> Rows:
        """Return the given rows of a weight from the files of the checkpoint."""
        if address not in self._row_numbers:
            self._row_numbers = dict(self._number_rows(address))
        numbers = self._row_numbers.get(address)
        if numbers is not None:
            return self._gather_rows(self._sources[address].names, numbers[rows.start : rows.stop])
        matrix = self._read_whole(address).reshape(matrix_shape(self.shapes[address]))
        # Copy the rows, so that the mapping of the whole tensor ends here.
        return torch.empty(len(rows), matrix.shape[1]).copy_(matrix[rows.start : rows.stop])

    def _number_rows(self, address: str) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the weights that share a tensor rule with `address`, each with the numbers of its rows in the file.

        Row numbers of None mean that the rule moves columns. Rules only move entries, so applying a rule to the numbers
        of the stored rows shows the origin of each row.
        """
        source = self._sources.get(address)
        shapes = self._shapes_in_files(() if source is None else source.names)
        is_matrix = all(len(shape) > 1 for shape in shapes)
        if source is None or not shapes or not is_matrix or isinstance(self._file_tensors.files, PackedFiles):
            yield address, None
            return
        numbers = [
            torch.arange(start, start + math.prod(shape[:-1])).view(*shape[:-1], 1)
            for start, shape in zip(_starts(shapes), shapes, strict=True)
        ]
        try:
            moved = source.bound.load(numbers)
        except (ValueError, RuntimeError, IndexError):
            moved = []
        for index, ours in enumerate(source.bound.ours):
            shape = self.shapes[ours]
            has_rows = index < len(moved) and len(shape) > 1 and moved[index].shape == (*shape[:-1], 1)
            yield ours, moved[index].flatten() if has_rows else None

    def _shapes_in_files(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        file_tensors = self._file_tensors
        return [file_tensors.files.headers[file_tensors.names[name]].shape for name in names]

    def _gather_rows(self, names: Sequence[str], numbers: Tensor) -> Rows:
        """Read stored rows by their numbers; consecutive rows are read together."""
        starts = _starts(self._shapes_in_files(names))
        runs = []
        for run in numbers.tensor_split((numbers.diff() != 1).nonzero().flatten() + 1):
            index = bisect.bisect_right(starts, int(run[0])) - 1
            first = int(run[0]) - starts[index]
            stored = self._file_tensors.names[names[index]]
            runs.append(self._file_tensors.files.read_rows(stored, range(first, first + len(run))).float())
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def _read_whole(self, address: str) -> Tensor:
        if address in self._pooled:
            return self._pooled[address]
        if address in self._whole_tensors:
            return self._whole_tensors[address]
        source = self._sources[address]
        self._whole_tensors = {}
        tensors = dict(zip(source.bound.ours, self._file_tensors.read(source, is_kept=False), strict=True))
        if not source.bound.is_view or isinstance(self._file_tensors.files, PackedFiles):
            self._whole_tensors = tensors
        return tensors[address]


def _starts(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the number of the first row of each stored tensor; a gap in the numbers separates two tensors."""
    return list(accumulate((math.prod(shape[:-1]) + 1 for shape in shapes[:-1]), initial=0))


def open_weights(ref: str) -> StoredWeights:
    """Open the weights that a reference names, without loading them.

    Args:
        ref: a run directory, optionally with a label, a saved model, or a Hugging Face checkpoint or its hub name.

    Raises:
        InputError: there is no usable model; the message says what was expected.
    """
    reference = ModelReference.locate(ref)
    folder = reference.checkpoint_folder()
    if folder is not None:
        return CheckpointWeights(ref, open_checkpoint(folder))
    files = find_files(reference)
    return FileWeights(ref, Model.from_file(files.folder / SPEC_FILE), files.weights)
