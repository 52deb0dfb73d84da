"""What this machine can do at most: bytes read from memory and operations of matrix products in a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import torch

from clearhead.fast.native.load import library
from clearhead.fast.probe import has_exact_int_mm, has_fast_bf16, processor

Precision = Literal["fp32", "bf16", "int8", "int4"]
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Of the matrices that are multiplied; in int8 and int4 their numbers have 8 bits."""

BUFFER_BYTES: Final = 512_000_000
"""More than any cache holds."""
MATRIX_SIZE: Final = 2048
REPEATS: Final = 10
SECONDS: Final = 1.5
"""After which nothing is repeated."""


@dataclass(frozen=True)
class Limits:
    """The limits of a device with some number of threads.

    Attributes:
        threads: of the CPU.
        bytes_per_second: read from a buffer that no cache holds.
        flops: by precision, of the product of two square matrices; one multiplication and one addition are 2. Where
            PyTorch has no fast product in 8 bits, twice that in fp32, as `vpmaddwd` makes twice the products of an FMA;
            four times with AVX-VNNI.
    """

    threads: int
    bytes_per_second: float
    flops: dict[str, float]


def fast_precisions(device: torch.device) -> tuple[Precision, ...]:
    """Return the precisions in which a device multiplies matrices fast."""
    precisions: list[Precision] = ["fp32"]
    if has_fast_bf16(device):
        precisions.append("bf16")
    if device.type == "cpu" and library() is not None:
        precisions.append("int8")
    return tuple(precisions)


def measure_limits(
    device: torch.device,
    precisions: Sequence[Precision],
    *,
    buffer_bytes: int = BUFFER_BYTES,
    size: int = MATRIX_SIZE,
    repeats: int = REPEATS,
) -> Limits:
    """Measure a device with the present number of threads, the best of several tries within a second or two.

    Args:
        device: the CPU or an accelerator.
        precisions: of the matrix products, fp32 before int8 and int4.
        buffer_bytes: of the buffer that is read.
        size: rows and columns of the matrices.
        repeats: tries of each.
    """
    buffer = torch.ones(buffer_bytes // 4, device=device)
    bandwidth = 4 * len(buffer) / best_seconds(buffer.sum, device, repeats)
    del buffer
    flops: dict[str, float] = {}
    for precision in precisions:
        in_8_bits = precision in ("int8", "int4")
        if in_8_bits and not has_exact_int_mm():
            flops[precision] = flops["fp32"] * (4 if "avx_vnni" in processor().isa else 2)
            continue
        matrix = torch.full((size, size), 1 / size, device=device).to(torch.int8 if in_8_bits else DTYPES[precision])
        multiply = partial(torch._int_mm if in_8_bits else torch.mm, matrix, matrix)
        flops[precision] = 2 * size**3 / best_seconds(multiply, device, repeats)
    return Limits(torch.get_num_threads(), bandwidth, flops)


def best_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the seconds of the fastest of several tries, as many as begin within `SECONDS`."""
    began, times = time.perf_counter(), [seconds(work, device)]
    while len(times) <= repeats and time.perf_counter() - began < SECONDS:
        times.append(seconds(work, device))
    return min(times)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of some work on a device."""
    began = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began
