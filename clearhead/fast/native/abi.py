"""The structures that kernels take, made of `abi.h`, where they are declared once."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from operator import is_
from pathlib import Path
from typing import Any, Final

from torch import Tensor

_HEADER: Final = Path(__file__).with_name("abi.h")
_NUMBERS: Final = {"int64_t": ctypes.c_int64, "float": ctypes.c_float}
_ADD: Final = ctypes.CFUNCTYPE(None, *(ctypes.c_char_p,) * 3, *(ctypes.c_int64,) * 2)


@cache
def _declarations() -> dict[str, list[tuple[str, ...]]]:
    """Return the fields of each structure (type, name, and how many in an array), and the values of each list."""
    found: dict[str, list[tuple[str, ...]]] = {}
    text = re.sub("//.*", "", _HEADER.read_text("utf-8").rpartition("#else")[2])
    for kind, arguments in re.findall(r"\b([A-Z]+)\(([^)]*)\)", text):
        if kind in ("STRUCT", "ENUM"):
            last = found[arguments] = []
        else:
            last.append(tuple(argument.strip() for argument in arguments.split(",")))
    return found


def values(name: str) -> dict[str, int]:
    """Return the names of a list in `abi.h`, in lower case, with their numbers."""
    return {value.lower(): number for number, (value,) in enumerate(_declarations()[name])}


def _fields(name: str) -> list[tuple[str, Any]]:
    """Return the fields of a structure; those of a structure within it must be there."""

    def kind(of: str) -> Any:
        return ctypes.c_void_p if of.endswith("*") else _NUMBERS.get(of) or globals()[of]

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

    def is_made_of(self, parts: tuple[object, ...]) -> bool:
        """Return whether it was filled from these very objects."""
        return len(self.made_of) == len(parts) and all(map(is_, self.made_of, parts))


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


def _described(library: ctypes.CDLL) -> dict[tuple[str, str], tuple[str, int, int]]:
    """Return what a library was compiled with: type, offset and bytes of each field, and of each structure ("")."""
    found: dict[tuple[str, str], tuple[str, int, int]] = {}

    def add(structure: bytes, field: bytes, kind: bytes, offset: int, size: int) -> None:
        found[structure.decode(), field.decode()] = kind.decode(), offset, size

    library.describe(_ADD(add))
    return found


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
                place = getattr(structure, field)
                ours[name, field] = kind, place.offset, place.size
    theirs = _described(library)
    for structure, field in {**ours, **theirs}:
        pair = ours.get((structure, field)), theirs.get((structure, field))
        if pair[0] != pair[1]:
            what = f"{structure}.{field}" if field else structure
            raise OSError(f"the compiled kernels have {what} as {pair[1]}, this package as {pair[0]}")
