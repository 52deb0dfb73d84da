"""The compiled kernels for what different processors can do."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import pytest

from clearhead.native import build

# What a compiler may use, and the flags of the processor that this needs.
LEVELS = {
    "AVX2": (["-march=x86-64-v3"], {"avx2"}),
    "AVX-512 VNNI": (["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"], {"avx512_vnni", "avx512_bf16"}),
    "this processor": (["-march=native"], set()),
}


@pytest.fixture(scope="module", params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    """The kernels for one level, in place of those for this processor."""
    options, needed = LEVELS[request.param]
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    if not needed <= set(flags):
        pytest.skip(f"this processor has no {', '.join(sorted(needed - set(flags)))}")
    compiled = cache(partial(build.compiled, options))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "library", compiled)
        build.function.cache_clear()
        yield compiled(build.INFERENCE)
    build.function.cache_clear()
