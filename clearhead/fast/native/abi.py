"""Structures of the kernels, generated from `abi.h`, and addresses of tensors after a check of dtype and shape."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from operator import is_
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

_HEADER: Final = Path(__file__).with_name("abi.h")
_NUMBERS: Final = {"int64_t": ctypes.c_int64, "float": ctypes.c_float}
_ADD: Final = ctypes.CFUNCTYPE(None, *(ctypes.c_char_p,) * 3, *(ctypes.c_int64,) * 2)


@cache
def _declarations() -> dict[str, list[tuple[str, ...]]]:
    """Parse `abi.h`: return the fields of each structure (type, name, array size), and each enumeration's values."""
    declarations: dict[str, list[tuple[str, ...]]] = {}
    text = re.sub("//.*", "", _HEADER.read_text("utf-8").rpartition("#else")[2])
    for kind, arguments in re.findall(r"\b([A-Z]+)\(([^)]*)\)", text):
        if kind in ("STRUCT", "ENUM"):
            last = declarations[arguments] = []
        else:
            last.append(tuple(argument.strip() for argument in arguments.split(",")))
    return declarations


def values(name: str) -> dict[str, int]:
    """Return the names of an enumeration in `abi.h`, in lower case, with their numbers."""
    return {value.lower(): number for number, (value,) in enumerate(_declarations()[name])}


def _fields(name: str) -> list[tuple[str, Any]]:
    """Return the fields of a structure; structures inside it must be defined already."""

    def kind(type_name: str) -> Any:
        return ctypes.c_void_p if type_name.endswith("*") else _NUMBERS.get(type_name) or globals()[type_name]

    fields = _declarations()[name]
    return [(field[1], kind(field[0]) * int(field[2]) if len(field) == 3 else kind(field[0])) for field in fields]


ACTIVATIONS: Final = {name: number for name, number in values("Activation").items() if name != "none"}
"""Activations that the kernels compute, with their numbers."""
NO_ACTIVATION: Final = values("Activation")["none"]


class Norm(ctypes.Structure):
    """Norm over the last axis."""

    __slots__ = ()  # setting an unknown field raises an error
    _fields_ = _fields("Norm")


class Matrix(ctypes.Structure):
    """Matrix of a linear layer, with its bias and its scales."""

    __slots__ = ()
    _fields_ = _fields("Matrix")


class Branch(ctypes.Structure):
    """Branch of a residual step: a feed-forward network or an attention."""

    __slots__ = ()
    _fields_ = _fields("Branch")


class Keys(ctypes.Structure):
    """Keys and values of an attention in one call.

    Attributes:
        tensors: tensors whose addresses are stored, kept alive.
        sources: objects that the structure was filled from; it must be filled again if they change.
    """

    __slots__ = ("sources", "tensors")
    _fields_ = _fields("Keys")

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self.sources: tuple[object, ...] = ()

    def is_made_from(self, sources: tuple[object, ...]) -> bool:
        """Return whether the structure was filled from the same objects as `sources`, compared by identity."""
        return len(self.sources) == len(sources) and all(map(is_, self.sources, sources))


def _structure(name: str) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"__slots__": (), "_fields_": _fields(name)})


StackCall: Final = _structure("StackCall")
LinearArgs: Final = _structure("LinearArgs")
LinearCall: Final = _structure("LinearCall")
LossCall: Final = _structure("LossCall")
Heads: Final = _structure("Heads")
AttentionCall: Final = _structure("AttentionCall")
RotationCall: Final = _structure("RotationCall")
StreamCall: Final = _structure("StreamCall")
MuonMatrix: Final = _structure("MuonMatrix")
MuonCall: Final = _structure("MuonCall")


def _read_layout(library: ctypes.CDLL) -> dict[tuple[str, str], tuple[str, int, int]]:
    """Return the memory layout in a library: type, offset and bytes of each field, and of each structure ("")."""
    layout: dict[tuple[str, str], tuple[str, int, int]] = {}

    def add(structure: bytes, field: bytes, kind: bytes, offset: int, size: int) -> None:
        layout[structure.decode(), field.decode()] = kind.decode(), offset, size

    library.describe(_ADD(add))
    return layout


def check(library: ctypes.CDLL) -> None:
    """Refuse a library whose structures differ from those of this package.

    Raises:
        OSError: the structures differ; the message names the first difference.
    """
    ours: dict[tuple[str, str], tuple[str, int, int]] = {}
    for name, fields in _declarations().items():
        structure = globals().get(name)
        if structure is not None:
            ours[name, ""] = "", 0, ctypes.sizeof(structure)
            for kind, field, *_ in fields:
                descriptor = getattr(structure, field)
                ours[name, field] = kind, descriptor.offset, descriptor.size
    theirs = _read_layout(library)
    for structure, field in {**ours, **theirs}:
        pair = ours.get((structure, field)), theirs.get((structure, field))
        if pair[0] != pair[1]:
            item = f"{structure}.{field}" if field else structure
            raise OSError(f"the compiled kernels have {item} as {pair[1]}, expected {pair[0]}")


_PLAIN: Final = (Tensor, nn.Parameter)


class UnfitTensor(ValueError):
    """A tensor does not have the dtype, shape or layout that a kernel reads."""


def fits(tensor: Tensor, dtype: torch.dtype, *shape: int, by_row: bool = False) -> bool:
    """Return whether a kernel can read a tensor: on the CPU, of this dtype and shape, and contiguous.

    Args:
        tensor: any tensor.
        dtype: expected dtype.
        shape: expected shape.
        by_row: True if only the last axis must be contiguous, because the kernel gets the strides.
    """
    # Subclasses, such as weights that are sharded over processes, may have no address.
    if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.dtype != dtype or tensor.shape != shape:
        return False
    return tensor.is_contiguous() or (by_row and (shape[-1] == 1 or tensor.stride(-1) == 1))


def address(tensor: Tensor, dtype: torch.dtype, *shape: int, by_row: bool = False) -> int:
    """Return the address of a tensor that a kernel may read and write.

    Args:
        tensor, dtype, shape, by_row: the arguments of `fits`. The tensor must live as long as the address is used.

    Raises:
        UnfitTensor: the tensor does not fit.
    """
    if not fits(tensor, dtype, *shape, by_row=by_row):
        raise UnfitTensor(
            f"a kernel reads {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)} with the strides "
            f"{list(tensor.stride())} on {tensor.device}"
        )
    return tensor.data_ptr()


def index_address(indices: Tensor, count: int, below: int) -> int:
    """Return the address of int64 indices that a kernel uses for memory access, each from 0 to below a bound.

    Raises:
        UnfitTensor: the indices do not fit, or one is out of range.
    """
    pointer = address(indices, torch.int64, count)
    least, most = (int(bound) for bound in indices.aminmax()) if count else (0, 0)
    if least < 0 or most >= below:
        raise UnfitTensor(f"a kernel reads indices from 0 to {below - 1}, got some from {least} to {most}")
    return pointer
