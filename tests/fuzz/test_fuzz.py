"""Tests of the fuzz itself, which `make fuzz` runs."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.fast.native import load
from clearhead.fast.stored import quantize
from tests.fuzz import cases, uses
from tests.fuzz.cases import Findings, fuzz
from tests.fuzz.folders import KINDS
from tests.fuzz.kernels import KINDS as KERNEL_KINDS
from tests.fuzz.kernels import Case as KernelCase
from tests.fuzz.kernels import compare_kernels, draw_case
from tests.fuzz.mutations import mutate_bytes, mutate_json
from tests.fuzz.requests import draw_request, fault_of


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ("raise KeyError('a key')", "KeyError"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("while True: pass", "TooLong"),
        ("bytearray(2**33)", "MemoryError"),
        ("open('escaped', 'w')", "outside"),
    ],
)
def test_a_fault_of_any_kind_is_shown_with_its_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str, expected: str
) -> None:
    for name in KINDS:
        monkeypatch.setitem(KINDS, name, lambda folder: (folder / "a").mkdir(parents=True) or (folder / "b").touch())
    monkeypatch.setattr(cases, "draw_use", lambda *arguments: ("python", lambda: exec(broken)))
    monkeypatch.setattr(cases, "SECONDS", 1)
    monkeypatch.setattr(cases, "_import_all", lambda: None)
    findings = Findings()
    next(fuzz(tmp_path, 1, findings))
    shown = capsys.readouterr().out
    assert list(findings.uses.values()) == [1] and "case 0: " in shown and expected in shown


@pytest.mark.parametrize("words", [["inspect", "nothing"], ["inspect", "case", "--no-such-option"]])
def test_a_refused_command_line_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stderr").write_text("clearhead: refused")
    with pytest.raises(uses.InputError):
        uses.command(words, tmp_path)
    monkeypatch.setattr(uses.command_line, "main", lambda words: (tmp_path / "left").touch() or 2)
    with pytest.raises(uses.Fault, match="left"):
        uses.command(words, tmp_path)


@pytest.mark.parametrize("mutated", [mutate_json, mutate_bytes])
def test_a_change_follows_from_its_seed(mutated: object) -> None:
    content = b'{"a": [1, {"b": null}], "c": "text"}'
    assert callable(mutated)
    draws = [[mutated(content, random.Random(number)) for number in range(50)] for _ in range(2)]
    assert draws[0] == draws[1] and len({changed for changed, _ in draws[0]}) > 25


def test_requests_follow_from_their_seed_and_faults_of_answers_are_found() -> None:
    draws = [[draw_request(random.Random(number)) for number in range(50)] for _ in range(2)]
    assert draws[0] == draws[1] and len({content for _, content in draws[0]}) > 40
    right = b'HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n\r\n{"error": {"message": "MESSAGE"}}'
    assert fault_of(right) is None and fault_of(b"") is None
    for wrong in (b"nothing", right.replace(b"400", b"500"), right.replace(b"MESSAGE", b"")):
        assert fault_of(wrong) is not None


class WrongKernels:
    """Kernels whose outputs are wrong in one number, or that write one number too many."""

    def __init__(self, library: Any, *, writes_beyond: bool) -> None:
        self.library, self.writes_beyond = library, writes_beyond

    def __getattr__(self, name: str) -> Any:
        def run(*arguments: Any) -> None:
            getattr(self.library, name)(*arguments)
            size = arguments[-4].value * arguments[-3].value
            outputs = ctypes.cast(arguments[-5], ctypes.POINTER(ctypes.c_float))
            outputs[size if self.writes_beyond else size - 1] = 7.0

        return run


def test_kernels_equal_their_plain_form_and_wrong_ones_are_found() -> None:
    library = load.library()
    if library is None:
        pytest.skip("there are no compiled kernels")
    counts: Counter[str] = Counter()
    assert not list(filter(None, itertools.islice(compare_kernels({"here": library}, 5, counts), 60)))
    assert set(counts) == set(KERNEL_KINDS)
    for writes_beyond in (False, True):
        wrong: Any = WrongKernels(library, writes_beyond=writes_beyond)
        findings = list(itertools.islice(compare_kernels({"here": wrong}, 5, counts), 20))
        assert all(findings) and ("outside" in str(findings[0])) == writes_beyond
    assert str(draw_case(random.Random("5 kernels 3"))) == str(draw_case(random.Random("5 kernels 3")))


def test_the_plain_form_rounds_ties_like_the_kernels() -> None:
    library = load.library()
    if library is None:
        pytest.skip("there are no compiled kernels")
    most_M1 = torch.rand(500, 1) + 0.5
    x = torch.cat([most_M1, most_M1 * (torch.arange(64) + 0.5) / 127], 1)
    weight, bias = torch.randn(20, x.shape[1]), torch.zeros(20)
    assert KernelCase("int8", x, (*quantize(weight), bias), threads=1).fault(library) is None
