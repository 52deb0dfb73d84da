"""Weights in huge pages: separate, aligned, returned to the system, and advised to the kernel."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead import presets
from clearhead.core import build
from clearhead.fast import huge_pages
from clearhead.fast.runner import Runner
from clearhead.fast.stored import INT4, INT8, Stored, store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these huge pages")
CPU = torch.device("cpu")
HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").is_dir()


def flags_of(address: int) -> set[str]:
    """Return the flags of the mapping that holds an address; an empty set if nothing is mapped there."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            first, last = (int(number, 16) for number in words[0].split("-"))
            is_here = first <= address < last
        if is_here and words[0] == "VmFlags:":
            return set(words[1:])
    return set()


@pytest.mark.parametrize("seed", range(4))
def test_weights_are_separate_aligned_and_have_their_shape(seed: int) -> None:
    draw = random.Random(seed)
    dtypes = [torch.int8, torch.uint8, torch.bfloat16, torch.float16, torch.float32]
    shapes = [(draw.randrange(1, 3000), draw.randrange(1, 3000)) for _ in range(20)]
    weights = [huge_pages.allocate(shape, draw.choice(dtypes), CPU) for shape in shapes]
    for number, weight in enumerate(weights):
        weight.fill_(number)
    for number, (weight, shape) in enumerate(zip(weights, shapes, strict=True)):
        assert weight.shape == shape and weight.is_contiguous() and weight.data_ptr() % 64 == 0
        assert weight.untyped_storage().nbytes() == weight.nbytes and bool((weight == number).all())


def test_threads_never_share_bytes() -> None:
    chunk = huge_pages._Chunk()
    with ThreadPoolExecutor(8) as threads:
        taken = [*threads.map(lambda size: (size, *chunk.take(size)), [100_000 + number for number in range(2000)])]
    by_memory: dict[int, list[tuple[int, int]]] = {}
    for size, memory, offset in taken:
        assert offset + size <= len(memory)
        by_memory.setdefault(id(memory), []).append((offset, offset + size))
    for spans in by_memory.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize("rows", [2**9, 2**13])
def test_memory_goes_back_with_the_last_weight(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_SHARED", huge_pages._Chunk())
    weights = [huge_pages.allocate((rows, 2**11), torch.int8, CPU) for _ in range(2)]
    first, second = (weight.data_ptr() for weight in weights)
    assert (second - first == weights[0].nbytes) == (rows == 2**9)
    assert "hg" in flags_of(second) or not HAS_HUGE_PAGES
    del weights[0]
    weights[0].fill_(1)
    weights.clear()
    assert "hg" not in flags_of(second)


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_matrices_that_are_converted_lie_in_huge_pages(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, allocated = huge_pages.allocate, list[Tensor]()

    def record(*words: Any) -> Tensor:
        allocated.append(allocate(*words))
        return allocated[-1]

    monkeypatch.setattr(huge_pages, "allocate", record)
    monkeypatch.setattr(huge_pages, "_LEAST", 1)
    module = build(presets.llama_tiny(60, layers=2)).eval()
    matrices = [layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear)]
    if precision == "bf16":
        Runner(module, in_bf16=True).tree()
        assert sum(weight.numel() for weight in allocated) >= sum(matrices)
    else:
        stored = store(module, {"int8": INT8, "int4": INT4}[precision])
        entries = [layer.entries()[0] for layer in stored.modules() if isinstance(layer, Stored)]
        assert {entry.data_ptr() for entry in entries} <= {weight.data_ptr() for weight in allocated}
        assert entries
    assert not HAS_HUGE_PAGES or all("hg" in flags_of(weight.data_ptr()) for weight in allocated)


def test_a_weight_that_fits_is_not_copied() -> None:
    weight = torch.randn(200, 200).bfloat16()
    assert huge_pages.convert(weight, torch.bfloat16).data_ptr() == weight.data_ptr()
    turned = huge_pages.convert(weight.T, torch.bfloat16)
    assert turned.is_contiguous() and turned.equal(weight.T)
    assert huge_pages.convert(weight, torch.float32).equal(weight.float())
    assert huge_pages.convert(weight.to("meta"), torch.int8).device.type == "meta"
