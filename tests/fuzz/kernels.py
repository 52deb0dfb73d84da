"""Compare the kernels of linear layers with their plain form, for random shapes, numbers, offsets and threads.

The kernels are compiled for each level that this processor has. The plain form rounds the rows of x like the kernels,
and multiplies in double precision. Products with fp16 weights must have the bits of those with the weights in bf16.

    python -m tests.fuzz.kernels --seed 3 --first 17 --cases 1
"""

from __future__ import annotations

import argparse
import ctypes
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from clearhead.fast.native import build, options
from clearhead.fast.nibbles import GROUP, quantize_groups, widen_groups
from clearhead.fast.probe import processor
from clearhead.fast.stored import LARGEST, quantize

LEVELS = {name: level for name, level in options.LEVELS.items() if name != "amx"}
KINDS = "float32", "mixed", "mixed_float16", "int8", "int4"
IN_BF16 = "mixed", "mixed_float16"
"""Kinds whose products are in bf16, so that the bits of a row may depend on the other rows."""
_MARGIN = 64
"""Numbers before and after the outputs, which no kernel may write."""
_MARK = 12345.0
_DTYPES = {"mixed": torch.bfloat16, "mixed_float16": torch.float16}


def compile_products(folder: Path, levels: Collection[str]) -> dict[str, Path]:
    """Compile the products of linear layers, and the search for scales, for some levels; return the files by level."""
    sources = [str(build.FOLDER / options.INFERENCE / name) for name in ("linear.cpp", "group_scales.cpp")]

    def compile_level(level: str) -> Path:
        file = folder / f"{level}.so"
        command = options.command("g++", options.INFERENCE, LEVELS[level][1])
        subprocess.run([*command, "-shared", *sources, "-o", str(file)], check=True, capture_output=True)
        return file

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(levels, pool.map(compile_level, levels), strict=True))


def lacking_sets(level: str) -> set[str]:
    """Return the instruction sets of a level that this processor lacks."""
    return set(LEVELS[level][0]) - processor().isa


def product(library: ctypes.CDLL, kind: str, x: Tensor, *weights: Tensor, threads: int = 2) -> Tensor:
    """Return the outputs of a linear layer, whose weights are a matrix, the scales that its kind has, and a bias.

    Raises:
        AssertionError: the kernel wrote outside of the outputs.
    """
    rows, outputs = len(x), len(weights[0])
    buffer = torch.full((rows * outputs + 2 * _MARGIN,), _MARK)
    y = buffer[_MARGIN:-_MARGIN].fill_(torch.nan).view(rows, outputs)
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, *weights, y)]
    sizes = [ctypes.c_int64(size) for size in (rows, outputs, x.shape[1], threads)]
    getattr(library, f"linear_{kind}")(*addresses, *sizes)
    assert (buffer[:_MARGIN] == _MARK).all() and (buffer[-_MARGIN:] == _MARK).all(), "written outside of the outputs"
    return y


@dataclass(frozen=True)
class Case:
    """Inputs of one product."""

    kind: str
    x: Tensor
    weights: tuple[Tensor, ...]
    threads: int

    def __str__(self) -> str:
        rows, inputs = self.x.shape
        return f"{self.kind}, {rows} rows, {len(self.weights[0])} outputs, {inputs} inputs, {self.threads} threads"

    def plain(self) -> tuple[Tensor, Tensor]:
        """Return the outputs in double precision, and the sums of magnitudes that limit their rounding errors."""
        matrix, *scales, bias = self.weights
        if self.kind == "int8":
            wide = matrix.double() * scales[0].double()[:, None]
        else:
            wide = widen_groups(matrix, scales[0]).double() if self.kind == "int4" else matrix.double()
        if self.kind == "mixed_float16":
            wide = matrix.bfloat16().double()
        x = self.x.bfloat16().double() if self.kind in IN_BF16 else self.x.double()
        if self.kind in ("int8", "int4"):
            most = self.x.abs().amax(1, keepdim=True)
            # Not LARGEST / most: PyTorch computes that as LARGEST * (1 / most), and other ties would be rounded.
            inverse = torch.full_like(most, LARGEST) / most
            x = ((self.x * inverse).round() * (most / LARGEST)).double().masked_fill(most == 0.0, 0.0)
        return x @ wide.T + bias.double(), x.abs() @ wide.abs().T + bias.abs().double()

    def fault(self, library: ctypes.CDLL) -> str | None:
        """Return a message if a kernel differs from the plain form, or a row from the same row alone."""
        try:
            y = product(library, self.kind, self.x, *self.weights, threads=self.threads)
        except AssertionError as error:
            return str(error)
        expected, size = self.plain()
        is_number = self.x.isfinite().all(1)
        if y[~is_number].isfinite().any():
            return "a row with NaN or an infinite number has finite outputs"
        error = ((y.double() - expected).abs() / size.clamp(min=1e-30))[is_number]
        if not bool((error <= 1e-5).all()):
            return f"an output differs by {float(error.nan_to_num(torch.inf).max()):.2g} of its terms"
        if self.kind == "mixed_float16":
            matrix, bias = self.weights
            rounded = product(library, "mixed", self.x, matrix.bfloat16(), bias, threads=self.threads)
            if not torch.equal(rounded, y):
                return "an output has other bits than with weights in bf16"
        if self.kind not in IN_BF16 and len(self.x) > 1:
            row = len(self.x) // 2
            alone = product(library, self.kind, self.x[row : row + 1], *self.weights)
            if not torch.equal(alone.nan_to_num(), y[row : row + 1].nan_to_num()):
                return f"row {row} has other bits alone"
        return None


def draw_case(draw: random.Random) -> Case:
    """Return random inputs: small and large shapes, numbers of all magnitudes, and unaligned weights."""
    kind, most = draw.choice(KINDS), draw.choice((4, 40, 300))
    rows, outputs, inputs = draw.randint(1, min(most, 130)), draw.randint(1, most), draw.randint(1, most)
    inputs = -(-inputs // GROUP) * GROUP if kind == "int4" else inputs
    chance = torch.Generator().manual_seed(draw.randrange(2**31))
    x = torch.randn(rows, inputs, generator=chance) * 10.0 ** draw.randint(-6, 6)
    weight = torch.randn(outputs, inputs, generator=chance) * 10.0 ** draw.randint(-2, 2)
    bias = torch.randn(outputs, generator=chance) * draw.choice((0.0, 1.0))
    if draw.random() < 0.3:
        x[draw.randrange(rows)] = 0.0
        weight[draw.randrange(outputs)] = 0.0
    if draw.random() < 0.3:
        x[:, draw.randrange(inputs)] *= 1000.0
        weight[:, draw.randrange(inputs)] *= 30.0
    if draw.random() < 0.2 and kind in ("int8", "int4"):
        x[draw.randrange(rows), draw.randrange(inputs)] = draw.choice((torch.nan, torch.inf, -torch.inf))
    entries: tuple[Tensor, ...] = (weight.to(_DTYPES.get(kind, torch.float32)),)
    if kind == "mixed_float16" and draw.random() < 0.5:  # all finite numbers equally often, so many are subnormal
        bits = torch.randint(0x7C00, weight.shape, generator=chance, dtype=torch.int16)
        entries = (bits.view(torch.float16).copysign(weight.half()),)
    if kind in ("int8", "int4"):
        entries = quantize(weight) if kind == "int8" else quantize_groups(weight)
    if kind == "int4" and draw.random() < 0.3:  # bytes and scales that no rounding makes
        nibbles = torch.randint(0, 256, entries[0].shape, generator=chance, dtype=torch.uint8)
        entries = nibbles, torch.randn(entries[1].shape, generator=chance).half()
    return Case(kind, x, (*(_shift(entry, draw) for entry in entries), bias), draw.randint(1, 3))


def _shift(tensor: Tensor, draw: random.Random) -> Tensor:
    """Return a copy of a tensor that begins at a random multiple of its numbers' size, as in a mapped file."""
    offset = draw.choice((0, 1, 3, 8))
    copy = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)[offset:].view(tensor.shape)
    return copy.copy_(tensor)


def compare_kernels(
    libraries: Mapping[str, ctypes.CDLL], seed: int, counts: Counter[str], *, first: int = 0
) -> Iterator[str | None]:
    """Compare one case after another on every level, and yield a finding or None for each case, without end."""
    number = first
    while True:
        case = draw_case(random.Random(f"{seed} kernels {number}"))
        counts[case.kind] += 1
        faults = {level: case.fault(library) for level, library in libraries.items()}
        shown = "; ".join(f"{level}: {fault}" for level, fault in faults.items() if fault is not None)
        yield f"kernel case {number}: {case}: {shown}" if shown else None
        number += 1


def fuzz_kernels(
    seed: int, seconds: float, *, first: int = 0, cases: int | None = None
) -> tuple[Counter[str], list[str]]:
    """Compare kernels for some seconds, or a number of cases; return the number of cases by kind, and the findings."""
    counts: Counter[str] = Counter()
    findings: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        levels = [level for level in LEVELS if not lacking_sets(level)]
        libraries = {level: ctypes.CDLL(str(file)) for level, file in compile_products(Path(folder), levels).items()}
        end = time.monotonic() + seconds
        for finding in compare_kernels(libraries, seed, counts, first=first):
            findings += [finding] if finding is not None else []
            if counts.total() == cases or (cases is None and time.monotonic() > end):
                break
    return counts, findings


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=1, help="the number of cases")
    arguments = parser.parse_args()
    totals, shown_findings = fuzz_kernels(arguments.seed, 0.0, first=arguments.first, cases=arguments.cases)
    print(*shown_findings, f"{totals.total()} cases: {dict(totals)}", sep="\n")
    raise SystemExit(1 if shown_findings else 0)
