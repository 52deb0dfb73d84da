"""Kernels serve only after another process has found them correct on this machine."""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import presets
from clearhead.core import build as build_model
from clearhead.fast import selftest
from clearhead.fast.native import build, load
from clearhead.fast.native.load import refuse_other_openmp
from clearhead.fast.native.options import INFERENCE, TRAINING
from clearhead.fast.runner import Runner
from tests.processors import load_library

pytestmark = pytest.mark.slow
WRONG = "void top_float32() {}"
CRASH = "void top_float32() { __builtin_trap(); }"
HANG = 'void top_float32() { for (;;) __asm__ volatile(""); }'
OTHER_THREADS = "const void* openmp() { return reinterpret_cast<const void*>(&openmp); }"


def own_file(kernels: str = INFERENCE) -> Path:
    """The library for this processor, which the suite has compiled."""
    return build.compile_library(["-march=native"], kernels)


def beside(function: str, folder: Path) -> Path:
    """Return a library in which one function is replaced by another."""
    source, output = folder / "other.cpp", folder / "other.so"
    source.write_text(f'extern "C" __attribute__((visibility("default"))) {function}\n')
    command = ["g++", "-shared", "-fPIC", "-Wl,--no-as-needed", str(source), str(own_file()), "-o", str(output)]
    subprocess.run(command, check=True, timeout=60)
    return output


def kernels() -> Iterator[tuple[str, str]]:
    """The folder and the name of each kernel."""
    for folder in (INFERENCE, TRAINING):
        for file in (build.FOLDER / folder).glob("*.cpp"):
            text = file.read_text("utf-8")
            for name in re.findall(r"(?m)^(?:KERNEL void |TOP\(|SAMPLE\()(\w+)[(,]", text):
                yield folder, name


def test_a_right_library_passes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = own_file()
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path))
    build.refuse_untried(file, INFERENCE)
    monkeypatch.setattr(build, "_try_library", None)
    build.refuse_untried(file, INFERENCE)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (WRONG, "on this machine the kernels compute the highest numbers wrong"),
        (CRASH, "a test of the kernels on this machine ended with SIG"),
        (HANG, "a test of the kernels on this machine did not end within 2 s"),
        (OTHER_THREADS, "they use the OpenMP threads of "),
    ],
    ids=["wrong", "crash", "hang", "other threads"],
)
def test_plain_layers_serve_in_place_of_a_library_that_fails(
    function: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = beside(function, tmp_path)
    monkeypatch.setattr(load, "compile_library", lambda *_: file)
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    if function == HANG:
        monkeypatch.setattr(build, "TEST_SECONDS", 2)
    fast = Runner(build_model(presets.llama_tiny(20, layers=1)).eval())
    for _ in range(2):
        load._library.cache_clear()
        try:
            with caplog.at_level(logging.WARNING, logger="clearhead"):
                assert load.library() is None
                assert {served.backend for served in fast.report()} == {"plain"}
        finally:
            load._library.cache_clear()
        monkeypatch.setattr(build, "_try_library", None)  # It is tested once.
    messages = {record.message for record in caplog.records}
    assert len(messages) == 1 and len(caplog.records) == 2
    assert why in messages.pop()


def test_the_threads_of_other_libraries_are_refused(tmp_path: Path) -> None:
    refuse_other_openmp(load_library(own_file()))
    with pytest.raises(OSError, match=r"threads of .*other\.so, expected those of PyTorch, .*libgomp"):
        refuse_other_openmp(load_library(beside(OTHER_THREADS, tmp_path)))


@pytest.fixture
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel folder whose library for this processor serves without a test."""
    outcome: str = request.param
    library = load_library(own_file(outcome))
    monkeypatch.setattr(load, "library", lambda kernels="": library)
    if outcome == TRAINING and not load.has_gemm(outcome):
        pytest.skip("this processor has no AVX-512 for bf16")
    return outcome


@pytest.mark.parametrize("folder", [INFERENCE, TRAINING], indirect=True)
def test_right_kernels_are_far_from_what_is_refused(folder: str) -> None:
    assert all(error <= most / 1.5 for _, error, most in selftest.compare_kernels(folder))


def _zeroing(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *sizes, **named: allocate(*sizes, **named).zero_()


@pytest.mark.parametrize(("folder", "name"), sorted(kernels()), indirect=["folder"])
def test_a_kernel_that_does_nothing_is_found(folder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, called = load._kernel, []

    def kernel(library: Any, which: str, *sizes: int, is_shared: bool) -> Any:
        if which != name:
            return real(library, which, *sizes, is_shared=is_shared)
        return lambda *_: called.append(which)

    monkeypatch.setattr(load, "_kernel", kernel)
    # The result does not come from memory that was there before.
    for owner, allocator in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, allocator, _zeroing(getattr(owner, allocator)))
    assert selftest.fault_of(folder) is not None
    assert called
