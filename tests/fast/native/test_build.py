"""Compilation of the kernels: announced with its duration, and stopped together with the program."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from clearhead.apps.cli.console import show_library_messages
from clearhead.apps.cli.stopping import StopOnSignal, Stopped
from clearhead.fast.native import build
from clearhead.fast.native.options import INFERENCE, PACKAGED, library_name
from clearhead.fast.probe import processor
from tests.processors import load_library


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two small sources and an empty cache."""
    (tmp_path / INFERENCE).mkdir()
    for name in ("one", "two"):
        text = f'extern "C" __attribute__((visibility("default"))) int {name}() {{ return 1; }}\n'
        (tmp_path / INFERENCE / f"{name}.cpp").write_text(text)
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))


def test_a_command_says_once_that_it_compiles_and_how_long_it_took(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with show_library_messages():
            kernels = load_library(build.compile_library([]))
        assert (kernels.one(), kernels.two()) == (1, 1)
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("clearhead: compiling kernels for inference on this processor, once, which takes about ")
    assert re.fullmatch(r"clearhead: kernels for inference compiled in \d+\.\d s", second)


def test_python_is_told_by_the_logger_alone(capfd: pytest.CaptureFixture[str]) -> None:
    build.compile_library([])
    assert capfd.readouterr().err == ""


def test_no_compiler_goes_on_when_the_program_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler, started = tmp_path / "compiler", tmp_path / "started"
    compiler.write_text(f"#!/bin/sh\nsleep 60 &\necho $! >> {started}\nwait\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    # Otherwise the process of the tests would be ended.
    monkeypatch.setattr("clearhead.apps.cli.stopping.GRACE", 60)

    def stop() -> None:
        while not started.exists() or len(started.read_text().split()) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped), StopOnSignal():
        threading.Thread(target=stop, daemon=True).start()
        build.compile_library([])
    assert [path.name for path in (tmp_path / "cache" / "native").iterdir()] == ["lock"]
    for number in map(int, started.read_text().split()):
        for _ in range(1000):  # A killed process exists until the system has removed it.
            if is_running(number):
                time.sleep(0.01)
        assert not is_running(number)


def test_a_wheel_brings_the_best_library_for_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of the levels that the wheel has a file for."""
    assert build.find_packaged(INFERENCE) is None  # a checkout compiles
    folder, isa = build.FOLDER / PACKAGED, {"avx2", "avx_vnni", "avx512", "avx512_vnni"}
    folder.mkdir()

    def best(*without: str) -> str:
        changed = replace(processor(), isa=frozenset(isa - {*without}))
        monkeypatch.setattr(build, "processor", lambda: changed)
        file = build.find_packaged(INFERENCE)
        assert file is not None
        return file.name

    for level in ("avx2", "avx512", "avx512_bf16", "amx"):
        (folder / library_name(INFERENCE, level)).touch()
    isa |= {"avx512_bf16"}
    assert best() == "stack-avx512_bf16.so"
    assert best("avx512_vnni") == best("avx512_bf16") == "stack-avx512.so"
    assert best("avx512_vnni", "avx512", "avx512_bf16") == "stack-avx2.so"
    with pytest.raises(OSError, match="no kernels for this processor"):
        best(*isa)


def is_running(number: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    return False
