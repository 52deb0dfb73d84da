"""Measured limits of this machine: bytes read from memory per second, and FLOP/s of matrix products."""

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
"""Dtypes of the multiplied matrices; int8 and int4 multiply 8-bit numbers."""

BUFFER_BYTES: Final = 512_000_000
"""Bytes of the buffer; more than any cache."""
MATRIX_SIZE: Final = 2048
REPEATS: Final = 10
SECONDS: Final = 1.5
"""Seconds after which no measurement is repeated."""


@dataclass(frozen=True)
class Limits:
    """Measured memory bandwidth and FLOP/s of a device, for a number of CPU threads.

    Attributes:
        threads: the number of CPU threads.
        bytes_per_second: the bytes per second read from a buffer larger than the caches.
        flops: the operations per second of a product of two square matrices, by precision. A multiplication and an
            addition count as two operations. If PyTorch has no fast 8-bit product, int8 has twice the value of fp32,
            since `vpmaddwd` makes twice the products of an FMA. With AVX-VNNI it has four times the value.
    """

    threads: int
    bytes_per_second: float
    flops: dict[str, float]


def fast_precisions(device: torch.device) -> tuple[Precision, ...]:
    """Return the precisions with fast matrix products on a device."""
    precisions: list[Precision] = ["fp32"]
    if has_fast_bf16(device):
        precisions.append("bf16")
    if device.type == "cpu" and library() is not None:
        precisions += ["int8", "int4"]
    return tuple(precisions)


def measure_limits(
    device: torch.device,
    precisions: Sequence[Precision],
    *,
    buffer_bytes: int = BUFFER_BYTES,
    size: int = MATRIX_SIZE,
    repeats: int = REPEATS,
) -> Limits:
    """Measure the memory bandwidth and FLOP/s of a device with the current CPU threads, as the best of several tries.

    Args:
        device: the CPU or an accelerator.
        precisions: the precisions of the matrix products, fp32 before int8 and int4.
        buffer_bytes: the size of the buffer in bytes.
        size: the number of rows and columns of the matrices.
        repeats: the maximum number of repetitions of each measurement.
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
    """Return the shortest time in seconds of repeated calls of a function; no call begins after `SECONDS`."""
    began, times = time.perf_counter(), [seconds(work, device)]
    while len(times) <= repeats and time.perf_counter() - began < SECONDS:
        times.append(seconds(work, device))
    return min(times)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that one call of a function takes on a device."""
    began = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began
