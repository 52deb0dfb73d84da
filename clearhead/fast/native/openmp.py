"""Which OpenMP library runs the threads of kernels: that of PyTorch, or they would wait for each other's processors."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

import torch

_SYMBOL: Final = "omp_get_max_threads"


class _Place(ctypes.Structure):
    """What the dynamic linker knows of an address (`Dl_info`)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def refuse_other_openmp(library: ctypes.CDLL) -> None:
    """Refuse a library whose threads are not those of PyTorch.

    Raises:
        OSError: they are not.
    """
    library.openmp.restype = ctypes.c_void_p
    own, of_torch = _file_of(library.openmp()), _file_of(_of_torch())
    if own is None or own != of_torch:
        raise OSError(f"their threads would be those of {own}, and PyTorch has those of {of_torch}")


def _of_torch() -> int | None:
    """Return the address that PyTorch's libraries find: in what the whole program shares, then in what they need."""
    own = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for library in (None, str(own)):
        function = getattr(ctypes.CDLL(library), _SYMBOL, None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _file_of(address: int | None) -> str | None:
    place = _Place()
    is_found = address is not None and ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(place))
    return os.path.realpath(os.fsdecode(place.file)) if is_found else None
