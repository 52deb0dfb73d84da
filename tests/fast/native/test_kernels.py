"""The compiled kernels compared with PyTorch, for several processor levels, and under a sanitizer."""

from __future__ import annotations

import ctypes
import logging
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.fast.linear import float_linear, int8_linear, mixed_linear
from clearhead.fast.logits import top_and_log_total
from clearhead.fast.native import build, load
from clearhead.fast.native.options import INFERENCE, TRAINING
from tests.processors import options_of

pytestmark = pytest.mark.slow
# Rows, outputs and inputs: full tiles, partial tiles and vectors, and less than one.
SIZES = [(1, 64, 128), (2, 33, 64), (5, 37, 40), (16, 96, 192), (17, 50, 256), (90, 67, 64), (40, 3, 100), (3, 1, 7)]


LIBRARY = load.library


def linears(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_layers_are_those_of_exact_arithmetic(kernels: ctypes.CDLL, dtype: torch.dtype, has_bias: bool) -> None:
    for rows, outputs, inputs in SIZES:
        x, weight, bias = linears(rows, outputs, inputs, dtype)
        exact = F.linear(x.double(), weight.double(), bias.double() if has_bias else None)
        run = float_linear(weight, bias if has_bias else None)
        assert run is not None
        with torch.inference_mode():
            actual = run(x.view(1, rows, inputs))[0]
        assert actual.dtype == dtype
        size = F.linear(x.double().abs(), weight.double().abs()).max()
        step = torch.finfo(dtype).eps
        assert (actual.double() - exact).abs().max() <= (
            4 * torch.finfo(torch.float32).eps * size + step * exact.abs().max()
        )


def test_mixed_layers_round_their_rows_alone(kernels: ctypes.CDLL) -> None:
    for rows, outputs, inputs in [*SIZES, (300, 32, 64)]:
        x, weight, bias = linears(rows, outputs, inputs, torch.float32)
        weight = weight.bfloat16()
        run = mixed_linear(weight, bias)
        assert run is not None
        exact = F.linear(x.bfloat16().double(), weight.double(), bias.double())
        step = torch.finfo(torch.bfloat16).eps if rows > 256 else 1e-6  # PyTorch computes many rows, with bf16 outputs.
        actual = run(x)
        assert actual.dtype == torch.float32
        assert (actual.double() - exact).abs().max() <= step * F.linear(x.abs(), weight.float().abs()).max()


def test_fp16_weights_have_the_bits_of_the_same_weights_in_bf16(kernels: ctypes.CDLL) -> None:
    for rows, outputs, inputs in [*SIZES, (300, 32, 64)]:
        x, weight, bias = linears(rows, outputs, inputs, torch.float32)
        weight = (weight * 2.0 ** torch.randint(-24, 15, (outputs, 1))).half()  # also subnormal numbers
        actual, expected = mixed_linear(weight, bias), mixed_linear(weight.bfloat16(), bias)
        assert actual is not None and expected is not None
        assert torch.equal(actual(x), expected(x)), (rows, outputs, inputs)


def test_layers_in_8_bits_are_the_products_of_rounded_rows(kernels: ctypes.CDLL) -> None:
    for rows, outputs, inputs in SIZES:
        x, _, bias = linears(rows, outputs, inputs, torch.float32)
        # Every row reaches 127, so its scale is 1 and rounding to 8 bits changes nothing.
        x = x.mul(30).round().clamp(-126, 126)
        x[:, 0] = 127
        weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        scale = torch.rand(outputs) + 0.5
        actual = int8_linear(weight, scale, bias)(x)
        exact = x.double() @ (weight.double() * scale.double()[:, None]).T + bias
        assert torch.allclose(actual.double(), exact, rtol=1e-5, atol=1e-3)


def test_rows_of_zeros_and_rows_that_are_no_numbers_stay_so(kernels: ctypes.CDLL) -> None:
    weight, scale, bias = torch.ones(32, 64, dtype=torch.int8), torch.ones(32), torch.arange(32.0)
    x = torch.zeros(3, 64)
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    actual = int8_linear(weight, scale, bias)(x)
    assert torch.equal(actual[0], bias)
    assert not actual[1:].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_highest_numbers_and_totals_are_those_of_torch(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    for size in (5, 16, 31, 1000):
        x = (torch.randn(3, size) * 10).to(dtype)
        for count in (1, 4, 5):
            values, places, totals = top_and_log_total(x, count)
            assert torch.equal(values, x.float().topk(count).values)
            assert torch.equal(x.float().gather(1, places), values)
            assert all(len(set(row)) == count for row in places.tolist())
            assert torch.allclose(totals, x.float().logsumexp(1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_banned_numbers_are_never_highest_and_count_in_the_total(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    for size in (5, 16, 31, 1000):
        x = (torch.randn(3, size) * 10).to(dtype)
        x[1, 2] = 300.0  # Far above all others: the sum needs a shift by this number.
        banned = torch.tensor([2, size - 1, 0, 2, size + 7])
        allowed = x.float().index_fill(1, banned[:4], -torch.inf)
        for count in (1, 2):
            values, places, totals = top_and_log_total(x, count, banned)
            assert torch.equal(values, allowed.topk(count).values)
            assert torch.equal(allowed.gather(1, places), values)
            assert torch.equal(totals, top_and_log_total(x, count)[2])
    values, _, totals = top_and_log_total(x, 1000, torch.arange(1000))
    assert (values == -torch.inf).all() and totals.isfinite().all()


def test_rows_with_infinite_numbers_and_with_none(kernels: ctypes.CDLL) -> None:
    x = torch.randn(4, 40)
    x[0, 3:] = -torch.inf
    x[1] = -torch.inf
    x[2, 5] = torch.nan
    x[3, 20:] = -200.0
    values, places, totals = top_and_log_total(x, 2)
    assert torch.equal(values[0], x[0].topk(2).values)
    assert torch.allclose(totals[[0, 3]], x[[0, 3]].logsumexp(1))
    assert totals[1] == -torch.inf
    assert totals[2].isnan()
    assert places.min() >= 0


def test_gradients_and_other_dtypes_take_the_plain_way() -> None:
    x, weight, bias = linears(2, 8, 8, torch.float32)
    weight.requires_grad_()
    run = float_linear(weight, bias)
    assert run is not None
    run(x).sum().backward()
    assert weight.grad is not None
    assert float_linear(weight.double(), None) is None
    assert float_linear(weight.T, None) is None


def test_without_a_compiler_pytorch_computes_and_one_sentence_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(load, "library", LIBRARY)
    load._library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="clearhead"):
            x, weight, _ = linears(3, 8, 16, torch.float32)
            assert float_linear(weight, None) is None
            matrix, scale = torch.randint(-127, 128, (8, 16), dtype=torch.int8), torch.rand(8)
            assert torch.allclose(int8_linear(matrix, scale, None)(x), F.linear(x, matrix * scale[:, None]))
            values, _, totals = top_and_log_total(x, 2)
        assert torch.equal(values, x.topk(2).values)
        assert torch.equal(totals, x.logsumexp(1))
        (record,) = caplog.records
        assert "there is no compiler no-such-compiler" in record.message
    finally:
        load._library.cache_clear()


def test_what_is_compiled_is_kept_and_a_failure_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path))
    with pytest.raises(OSError, match="failed"):
        build.compile_library(["-march=no-such-processor"])
    assert {file.name for file in (tmp_path / "native").iterdir()} <= {"lock"}


@pytest.mark.parametrize("level", ["AVX-512", "AMX emulated"])
@pytest.mark.parametrize("folder", [INFERENCE, TRAINING])
def test_no_kernel_reads_or_writes_outside_its_arrays(folder: str, level: str, tmp_path: Path) -> None:
    program = tmp_path / "program"
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    options = ["-O1", "-g", "-std=c++17", "-fopenmp", *options_of(level), *checks]
    driver = Path(__file__).parent / folder / "sanitized.cpp"
    sources = [str(file) for file in sorted((build.FOLDER / folder).glob("*.cpp"))]
    command = ["g++", *options, f"-I{build.FOLDER}", str(driver), *sources, "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
