"""Compiler options of the kernels, and the processor levels of a wheel; imports nothing of this package.

The build of a wheel (`hatch_build.py`) runs this file by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

INFERENCE: Final = "stack"
"""Source folder of the kernels for inference; each folder becomes one library, compiled at its first use."""
TRAINING: Final = "training"
PACKAGED: Final = "compiled"
"""Folder of the libraries in a wheel, next to the folders of the sources."""
_OPTIONS: Final = "-O3", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fPIC"
# The bits of a row must not depend on fused products and sums; in training, no bits are compared.
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
"""Processor levels, the best last: instruction sets that the probe must find, and the compiler options."""


def command(compiler: str, kernels: str, options: Sequence[str]) -> list[str]:
    """Return the compiler command for the kernels of a folder, without the files."""
    return [compiler, *_OPTIONS, *_EXACT.get(kernels, ()), _HIDDEN, *options]


def library_name(kernels: str, level: str) -> str:
    """Return the file name of a library in a wheel."""
    return f"{kernels}-{level}.so"
