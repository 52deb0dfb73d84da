"""Products on every level of x86: exact in 8 bits, one order of sums in fp32, and no register spills."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.fast import selftest
from clearhead.fast.native import build, load, options
from clearhead.fast.nibbles import quantize_groups, widen_groups
from tests.fuzz.kernels import LEVELS, compile_products, lacking_sets, product

pytestmark = pytest.mark.slow
ROWS = 1, 2, 3, 5, 7, 8, 9, 16, 17, 33, 47, 48, 64, 129, 257
SIZES = (96, 192), (37, 100), (130, 768)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The products alone, compiled for all levels in parallel."""
    return compile_products(tmp_path_factory.mktemp("levels"), LEVELS)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def library(level: str, files: dict[str, Path]) -> ctypes.CDLL:
    if lacking := lacking_sets(level):
        pytest.skip(f"this processor has no {', '.join(sorted(lacking))}")
    return ctypes.CDLL(str(files[level]))


def test_sums_in_8_bits_are_exact_for_any_weights(library: ctypes.CDLL) -> None:
    for rows in ROWS:
        for outputs, inputs in SIZES:
            x = torch.randint(-127, 128, (rows, inputs)).float()
            x[:, 0] = 127  # so that the scale of a row is 1
            weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
            weight[0], weight[1] = -128, 127
            scale, bias = torch.rand(outputs), torch.randn(outputs)
            exact = (x.long() @ weight.long().T).float() * scale + bias
            assert torch.equal(product(library, "int8", x, weight, scale, bias), exact), (rows, outputs, inputs)


def test_sums_in_4_bits_are_those_of_each_group_in_their_order_on_every_level(library: ctypes.CDLL) -> None:
    """Sums of each group are exact and in order, so a result has the same bits on every processor."""
    for rows in ROWS:
        for outputs, inputs in (96, 192), (37, 96), (130, 768), (3, 32):
            x = torch.randint(-127, 128, (rows, inputs)).float()
            x[:, 0] = 127
            nibbles = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
            nibbles[0], nibbles[1] = 0, 255
            scale, bias = torch.randn(outputs, inputs // 32).half(), torch.randn(outputs)
            integers = widen_groups(nibbles, torch.ones_like(scale)).view(outputs, -1, 32)
            sums = torch.einsum("mge,nge->mng", x.view(rows, -1, 32).double(), integers.double()).float()
            exact = torch.zeros(rows, outputs)
            for group in range(inputs // 32):
                exact += sums[..., group] * scale[:, group].float()
            assert torch.equal(product(library, "int4", x, nibbles, scale, bias), exact + bias), (rows, outputs, inputs)


def test_scales_of_4_bits_have_the_bits_of_the_plain_form_on_every_level(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.distributions.StudentT(3.0).sample((203, 32))
    weight[7], weight[8, 3], weight[9, 4] = 0.0, torch.nan, torch.inf
    monkeypatch.setattr(load, "library", lambda kernels="": library)
    compiled = quantize_groups(weight)
    monkeypatch.setattr(load, "library", lambda kernels="": None)
    for fast, plain in zip(compiled, quantize_groups(weight), strict=True):
        assert torch.equal(fast.view(torch.uint8), plain.view(torch.uint8))


def test_rows_from_48_on_take_packed_weights_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test below covers both paths, and wrong packed weights are found before kernels serve."""
    folder, file = tmp_path / "native", tmp_path / "wrong.so"
    shutil.copytree(build.FOLDER, folder, ignore=shutil.ignore_patterns("*.py", options.PACKAGED))
    panel = folder / "gemm" / "float_panel.h"
    right, wrong = "epilogue.write(sum, m + j);", "epilogue.write(-sum, m + j);"
    text = panel.read_text("utf-8")
    assert right in text
    panel.write_text(text.replace(right, wrong), "utf-8")
    command = options.command("g++", options.INFERENCE, LEVELS["avx2"][1])
    subprocess.run([*command, "-shared", str(folder / options.INFERENCE / "linear.cpp"), "-o", str(file)], check=True)
    library = ctypes.CDLL(str(file))
    x, weight, bias = torch.randn(48, 100), torch.randn(37, 100), torch.randn(37)
    exact = F.linear(x, weight, bias)
    torch.testing.assert_close(product(library, "float32", x[:47], weight, bias), exact[:47], rtol=1e-4, atol=1e-4)
    is_far = (product(library, "float32", x, weight, bias) - exact).abs() > 1e-4
    assert is_far[:, :32].float().mean() > 0.99 and not is_far[:, 32:].any()
    monkeypatch.setattr(load, "library", lambda kernels="": library)
    assert {what for what, error, most in selftest.compare_products() if error > most} == {"layers in fp32"}


@pytest.mark.parametrize("kind", ["int4", "int8", "float32"])
def test_a_row_has_the_bits_that_it_has_alone(library: ctypes.CDLL, kind: str) -> None:
    for outputs, inputs in SIZES:
        inputs = inputs // 32 * 32 if kind == "int4" else inputs
        x, weight, bias = torch.randn(ROWS[-1], inputs), torch.randn(outputs, inputs), torch.randn(outputs)
        weights: tuple[Tensor, ...] = (*quantize_groups(weight), bias) if kind == "int4" else (weight, bias)
        if kind == "int8":
            weights = weight.mul(30).clamp(-127, 127).to(torch.int8), torch.rand(outputs), bias
        alone = torch.cat([product(library, kind, row[None], *weights) for row in x])
        assert all(torch.equal(product(library, kind, x[:rows], *weights), alone[:rows]) for rows in ROWS)
        if kind == "float32":
            exact = F.linear(x.double(), weight.double(), bias.double())
            assert (alone - exact).abs().max() <= 1e-6 * F.linear(x.abs(), weight.abs()).max()


def test_bfloat16_is_exact_but_for_its_sums(library: ctypes.CDLL) -> None:
    for rows in ROWS[:7]:
        for outputs, inputs in SIZES:
            x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs)
            exact = F.linear(x.bfloat16().double(), weight.double(), bias.double())
            actual = product(library, "mixed", x, weight, bias)
            assert (actual - exact).abs().max() <= 1e-6 * F.linear(x.abs(), weight.abs().float()).max()


def test_float16_weights_have_the_bits_of_the_same_weights_in_bfloat16(library: ctypes.CDLL) -> None:
    """Every finite number occurs: subnormal ones, halves between two numbers of bfloat16, and the largest ones."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[every.isfinite()]
    for rows in ROWS:
        for outputs, inputs in SIZES:
            weight = every[torch.randint(len(every), (outputs, inputs))]
            x, bias = torch.randn(rows, inputs), torch.randn(outputs)
            expected = product(library, "mixed", x, weight.bfloat16(), bias)
            assert torch.equal(product(library, "mixed_float16", x, weight, bias), expected), (rows, outputs, inputs)
    columns = every.view(-1, 32)
    for unit in (torch.eye(32), torch.eye(32)[:1]):
        rounded = product(library, "mixed_float16", unit, columns, torch.zeros(len(columns)))
        assert torch.equal(rounded, columns.bfloat16().float().T[: len(unit)])


class Loop(NamedTuple):
    """An innermost loop of a kernel's assembly."""

    products: dict[str, int]  # number of multiplications by the beginnings of their names
    instructions: int
    on_stack: int
    scalars: int  # additions, where a number should only be repeated
    fetches: int  # prefetches of later operands


FLOORS = {
    "avx2": {"vfmadd": (12, 26), "vpmaddwd": (12, 37), "vpmaddubsw": (12, 51)},
    "avx_vnni": {"vfmadd": (12, 26), "vpdpbusd": (12, 27)},
    "avx512": {"vfmadd": (16, 36), "vpmaddwd": (16, 50), "vpmaddubsw": (16, 66)},
    "avx512_vnni": {"vfmadd": (16, 36), "vpdpbusd": (16, 34)},
    "avx512_bf16": {"vfmadd": (16, 36), "vpdpbusd": (16, 34), "vdpbf16ps": (16, 34)},
}
"""Number of multiplications, and of all instructions, in the best loop of each level."""


def loops_of(file: Path) -> Iterator[Loop]:
    """Yield the innermost loops that multiply."""
    kinds = sorted({kind for floors in FLOORS.values() for kind in floors})
    command = ["objdump", "-d", "--no-show-raw-insn", str(file)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for function in shown.split("\n\n"):
        lines = re.findall(r"^ *([0-9a-f]+):\t(?:\{\w+\} )?(\S+) *(\S*)", function, re.MULTILINE)
        places = {address: number for number, (address, *_) in enumerate(lines)}
        ends = {(places.get(to, number + 1), number) for number, (_, name, to) in enumerate(lines) if name[0] == "j"}
        loops = [(first, last) for first, last in ends if first <= last]
        for first, last in loops:
            if any(first <= start and end <= last for start, end in loops if (start, end) != (first, last)):
                continue
            body = lines[first : last + 1]
            products = {kind: sum(name.startswith(kind) for _, name, _ in body) for kind in kinds}
            if any(products.values()):
                on_stack = sum("(%rsp" in operands or "(%rbp" in operands for *_, operands in body)
                scalars, fetches = (
                    sum(name == instruction for _, name, _ in body) for instruction in ("vaddss", "prefetcht0")
                )
                yield Loop(products, len(body), on_stack, scalars, fetches)


def test_inner_loops_keep_their_sums_in_registers(level: str, files: dict[str, Path]) -> None:
    """A lower limit for the speed that needs no clock."""
    loops = list(loops_of(files[level]))
    for kind, (products, instructions) in FLOORS[level].items():
        matching = [loop for loop in loops if loop.products[kind] == products]
        best = [loop.instructions for loop in matching if not loop.on_stack]
        assert best and min(best) <= instructions, (kind, best)
        assert any(loop.fetches for loop in matching), (kind, "memory rests while rows are multiplied")
    for loop in loops:
        multiplied = sum(loop.products.values())
        assert multiplied < 8 or loop.on_stack <= 2 * multiplied, loop
        assert loop.instructions > 4 * multiplied or not loop.scalars, loop
