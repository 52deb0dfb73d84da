"""Weights of a model, on disk or in memory, read as a few rows at a time.

A vector of n numbers has n rows of one number; a stack of matrices has the rows of all of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from clearhead.checkpoints.hf.files.tensor_files import TensorFiles
from clearhead.checkpoints.reference import SPEC_FILE, ModelReference
from clearhead.checkpoints.runs.directory import find_files
from clearhead.checkpoints.weights.lora import LOW_RANK
from clearhead.core import Transformer
from clearhead.fast.stored import Format, formats_of, widened
from clearhead.spec import Model

Rows = Float[Tensor, "rows columns"]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of rows and of columns of a weight, as the module's docstring counts them."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (math.prod(shape), 1)


class StoredWeights(ABC):
    """Weights of a model: the shape of each by its address, and their rows.

    Args:
        name: reference of the model, for messages.
        model: spec of the model.
        shapes: shape of each weight, by address.
    """

    def __init__(self, name: str, model: Model, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.name: str = name
        self.model: Model = model
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    @abstractmethod
    def read_rows(self, address: str, rows: range) -> Rows:
        """Return some rows of a weight as float32, low-rank matrices merged and int8 dequantized."""


class ModuleWeights(StoredWeights):
    """Weights of a module in memory."""

    def __init__(self, name: str, module: Transformer) -> None:
        self._tensors: dict[str, Tensor] = widened(module.state_dict())
        super().__init__(name, module.spec, {address: tuple(one.shape) for address, one in self._tensors.items()})

    def read_rows(self, address: str, rows: range) -> Rows:
        """Return rows of a tensor of the module."""
        matrix = self._tensors[address].detach().reshape(matrix_shape(self.shapes[address]))
        return matrix[rows.start : rows.stop].float().cpu()


class FileWeights(StoredWeights):
    """Weights in the safetensors file of a run or a saved model."""

    def __init__(self, name: str, model: Model, path: Path) -> None:
        self._files: TensorFiles = TensorFiles(path.parent, path.name)
        self._formats: Mapping[str, Format] = formats_of(self._files)
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
        """Return rows from the file."""
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


def open_weights(ref: str) -> StoredWeights:
    """Open the weights that a reference names, without loading them.

    Args:
        ref: a run directory, optionally with a label; a saved model; a Hugging Face checkpoint or its name on the hub.

    Raises:
        InputError: no usable model is there; the message says what was expected.
    """
    reference = ModelReference.locate(ref)
    files = find_files(reference)
    return FileWeights(ref, Model.from_file(files.folder / SPEC_FILE), files.weights)
