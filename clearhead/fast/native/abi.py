"""Structures that kernels take, made of `abi.h`, and addresses of tensors, whose dtype and sizes are checked."""

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
    """Return the fields of each structure (type, name, and how many in an array), and the values of each list."""
    declarations: dict[str, list[tuple[str, ...]]] = {}
    text = re.sub("//.*", "", _HEADER.read_text("utf-8").rpartition("#else")[2])
    for kind, arguments in re.findall(r"\b([A-Z]+)\(([^)]*)\)", text):
        if kind in ("STRUCT", "ENUM"):
            last = declarations[arguments] = []
        else:
            last.append(tuple(argument.strip() for argument in arguments.split(",")))
    return declarations


def values(name: str) -> dict[str, int]:
    """Return the names of a list in `abi.h`, in lower case, with their numbers."""
    return {value.lower(): number for number, (value,) in enumerate(_declarations()[name])}


def _fields(name: str) -> list[tuple[str, Any]]:
    """Return the fields of a structure; those of a structure within it must be there."""

    def kind(type_name: str) -> Any:
        return ctypes.c_void_p if type_name.endswith("*") else _NUMBERS.get(type_name) or globals()[type_name]

    fields = _declarations()[name]
    return [(field[1], kind(field[0]) * int(field[2]) if len(field) == 3 else kind(field[0])) for field in fields]


ACTIVATIONS: Final = {name: number for name, number in values("Activation").items() if name != "none"}
"""The activations that kernels compute, with their numbers."""
NO_ACTIVATION: Final = values("Activation")["none"]


class Norm(ctypes.Structure):
    """A norm over the last axis."""

    __slots__ = ()  # a field that there is not cannot be set
    _fields_ = _fields("Norm")


class Matrix(ctypes.Structure):
    """The matrix of a linear layer, its bias and its scales."""

    __slots__ = ()
    _fields_ = _fields("Matrix")


class Branch(ctypes.Structure):
    """A branch of a residual step: a feed-forward network, or attention."""

    __slots__ = ()
    _fields_ = _fields("Branch")


class Keys(ctypes.Structure):
    """The keys and values of an attention in one call.

    Attributes:
        held: copies whose addresses it has.
        made_of: the tensors that it was filled from, and numbers, which tell whether it must be filled anew.
    """

    __slots__ = ("held", "made_of")
    _fields_ = _fields("Keys")

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Tensor] = []
        self.made_of: tuple[object, ...] = ()

    def is_made_from(self, sources: tuple[object, ...]) -> bool:
        """Return whether it was filled from these very objects."""
        return len(self.made_of) == len(sources) and all(map(is_, self.made_of, sources))


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
    """Return what a library was compiled with: type, offset and bytes of each field, and of each structure ("")."""
    layout: dict[tuple[str, str], tuple[str, int, int]] = {}

    def add(structure: bytes, field: bytes, kind: bytes, offset: int, size: int) -> None:
        layout[structure.decode(), field.decode()] = kind.decode(), offset, size

    library.describe(_ADD(add))
    return layout


def check(library: ctypes.CDLL) -> None:
    """Refuse a library whose structures differ from those of this package.

    Raises:
        OSError: they differ; the message names the first difference.
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
            raise OSError(f"the compiled kernels have {item} as {pair[1]}, this package as {pair[0]}")


_PLAIN: Final = (Tensor, nn.Parameter)


class UnfitTensor(ValueError):
    """A tensor is not what a kernel reads there."""


def fits(tensor: Tensor, dtype: torch.dtype, *shape: int, by_row: bool = False) -> bool:
    """Return whether a tensor is what a kernel reads: on the CPU, of this dtype and shape, and contiguous.

    Args:
        tensor: any.
        dtype: its numbers.
        shape: its sizes.
        by_row: whether only the numbers of its last axis must lie side by side, where the kernel is given its strides.
    """
    # Subclasses, such as weights that are spread over processes, may have no address.
    if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.dtype != dtype or tensor.shape != shape:
        return False
    return tensor.is_contiguous() or (by_row and (shape[-1] == 1 or tensor.stride(-1) == 1))


def address(tensor: Tensor, dtype: torch.dtype, *shape: int, by_row: bool = False) -> int:
    """Return the address of a tensor that a kernel may read and write.

    Args:
        tensor, dtype, shape, by_row: as for `fits`; the tensor must live as long as the address is in use.

    Raises:
        Unfit: it is something else.
    """
    if not fits(tensor, dtype, *shape, by_row=by_row):
        raise UnfitTensor(
            f"a kernel reads {dtype} {list(shape)}, and got {tensor.dtype} {list(tensor.shape)} with the strides "
            f"{list(tensor.stride())} on {tensor.device}"
        )
    return tensor.data_ptr()


def index_address(indices: Tensor, count: int, below: int) -> int:
    """Return the address of indices by which a kernel finds numbers in memory: int64, each from 0 to below a bound.

    Raises:
        Unfit: they are something else.
    """
    pointer = address(indices, torch.int64, count)
    least, most = (int(bound) for bound in indices.aminmax()) if count else (0, 0)
    if least < 0 or most >= below:
        raise UnfitTensor(f"a kernel reads indices from 0 to {below - 1}, and got some from {least} to {most}")
    return pointer
