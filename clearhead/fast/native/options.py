"""How kernels are compiled, and for which processors a wheel brings them; it imports nothing of this package.

The build of a wheel (`hatch_build.py`) runs this file alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

INFERENCE: Final = "stack"
"""The folder with the sources of the kernels for inference; each folder is a library, compiled when it is needed."""
TRAINING: Final = "training"
PACKAGED: Final = "compiled"
"""The folder of the libraries that a wheel brings, beside those of the sources."""
_OPTIONS: Final = "-O3", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fPIC"
# A row's results must not depend on where the compiler joins products and sums; in training none is compared so.
_EXACT: Final = {INFERENCE: ["-ffp-contract=off"]}
_HIDDEN: Final = "-fvisibility=hidden"  # two libraries have functions of the same names
_VNNI: Final = "-march=x86-64-v4", "-mavx512vnni"
_AMX: Final = "-mamx-tile", "-mamx-int8", "-mamx-bf16"
LEVELS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "avx2": (("avx2",), ("-march=x86-64-v3",)),
    "avx_vnni": (("avx_vnni",), ("-march=x86-64-v3", "-mavxvnni")),
    "avx512": (("avx512",), ("-march=x86-64-v4",)),
    "avx512_vnni": (("avx512_vnni",), _VNNI),
    "avx512_bf16": (("avx512_vnni", "avx512_bf16"), (*_VNNI, "-mavx512bf16")),
    "amx": (("amx",), (*_VNNI, "-mavx512bf16", *_AMX)),
}
"""Levels of processors, the best last: what the probe must find, and what the compiler may use."""


def command(compiler: str, kernels: str, options: Sequence[str]) -> list[str]:
    """Return how a compiler is called for the kernels of a folder, without the files."""
    return [compiler, *_OPTIONS, *_EXACT.get(kernels, ()), _HIDDEN, *options]


def library_name(kernels: str, level: str) -> str:
    """Return the name of a library of a wheel."""
    return f"{kernels}-{level}.so"
