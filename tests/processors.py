"""Compiled kernels for the instruction sets of different processors."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from clearhead.fast.native import build, load
from clearhead.fast.native.options import INFERENCE
from clearhead.fast.probe import processor

UNIT = Path(__file__).parent / "fast/native/matrix_unit.h"
_AVX_512 = ["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"]
# What a compiler may use, and the flags of the processor that this needs. The file's size is named so that what was
# compiled is not used when the file has changed.
LEVELS = {
    "AVX2": (["-march=x86-64-v3"], {"avx2"}),
    "AVX-512": (_AVX_512, {"avx512_vnni", "avx512_bf16"}),
    "AMX emulated": (
        [*_AVX_512, "-include", str(UNIT), f"-DSIZE={UNIT.stat().st_size}"],
        {"avx512_vnni", "avx512_bf16"},
    ),
    "this processor": (["-march=native"], set()),
}
WITH_BF16 = [level for level in LEVELS if level != "AVX2"]


def options_of(level: str) -> list[str]:
    """Return the options of the compiler for a level; skip where this processor does not have it."""
    options, needed = LEVELS[level]
    if lacking := needed - processor().isa:
        pytest.skip(f"this processor has no {', '.join(sorted(lacking))}")
    return options


def load_library(file: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(file))


@contextlib.contextmanager
def kernels_of(level: str) -> Iterator[ctypes.CDLL]:
    """Return a context manager that uses the kernels for one level instead of those for this processor."""
    options = options_of(level)

    @cache
    def library(kernels: str = INFERENCE) -> ctypes.CDLL:
        return load_library(build.compile_library(options, kernels))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "library", library)
        yield library(INFERENCE)
