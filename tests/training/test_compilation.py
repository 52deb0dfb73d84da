"""The choice to compile a training: obstacles, forecast, trial, and the choice that a resumed run keeps."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.base.errors import InputError
from clearhead.core import Transformer, build
from clearhead.fast.training import compiler
from clearhead.fast.training.compiled import NotCompiled
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.training import compilation
from clearhead.training.compilation import CompileChoice
from clearhead.training.parallel.world import ALONE
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.runfile.sections import Train
from clearhead.training.task_setup import PreparedTask
from tests.conftest import ROOT
from tests.model.test_training import PAIRS, tables
from tests.training.small import ShuffledTokens

CPU = torch.device("cpu")


class Lines(TrainingProgress):
    """A display that keeps its messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


def make_module(dropout: float = 0.0) -> Transformer:
    sizes = Hyperparameters(family="decoder", layers=2, width=8, heads=2, feedforward=8, dropout=dropout)
    return build(build_spec(sizes, source_vocab=29, target_vocab=29))


def decide(
    monkeypatch: pytest.MonkeyPatch, *, steps: int, compiled: Callable[[], float], is_sharded: bool = False
) -> tuple[bool, str]:
    """Decide for steps of one second that take `compiled()` seconds if they are compiled; return the last line."""

    def dry_run(choice: CompileChoice, *, compiles: bool) -> Any:
        seconds = compiled if compiles else lambda: 1.0
        return SimpleNamespace(time_forward_backward=lambda batch: seconds(), time_fastest=lambda *_, **__: seconds())

    monkeypatch.setattr(compilation, "find_obstacle", lambda module, device: "")
    monkeypatch.setattr(CompileChoice, "_dry_run", dry_run)
    monkeypatch.setattr(CompileChoice, "forecast_seconds", lambda choice: 9.0)
    monkeypatch.setattr(CompileChoice, "_remember", lambda choice, seconds: None)
    display, batches = Lines(), ShuffledTokens()
    before = batches.state()
    parts: PreparedTask[Any] = object.__new__(PreparedTask)
    vars(parts).update(batches=batches, largest=None)
    choice = CompileChoice(make_module(), parts, Train(run="run", steps=steps), "fp32", CPU, display, ALONE)
    chosen = choice.decide(is_sharded=is_sharded)
    assert batches.state() == before
    return chosen, display.lines[-1]


def refuse() -> float:
    raise NotCompiled("a custom module")


@pytest.mark.parametrize(
    ("steps", "compiled", "expected", "reason"),
    [
        (60, lambda: 0.5, False, "it would save about 18 s and take about 9.0 s"),
        (61, lambda: 0.5, True, "2 times the speed of eager steps"),
        (61, lambda: 1.5, False, "0.67 times the speed"),
        (61, refuse, False, "a custom module"),
    ],
)
def test_auto_compiles_where_the_run_gains_twice_the_forecast(
    monkeypatch: pytest.MonkeyPatch, steps: int, compiled: Callable[[], float], expected: bool, reason: str
) -> None:
    chosen, line = decide(monkeypatch, steps=steps, compiled=compiled)
    assert chosen is expected
    assert line.startswith(f"compile     {'on' if expected else 'off'}: ") and reason in line


def test_auto_leaves_sharded_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, line = decide(monkeypatch, steps=10**6, compiled=lambda: 0.1, is_sharded=True)
    assert not chosen and "compile = true" in line


def check(module: nn.Module, *, is_resumed: bool = False) -> None:
    choice: Any = SimpleNamespace(module=module, parts=None, device=CPU)
    CompileChoice.check(choice, is_resumed=is_resumed)


def test_an_obstacle_is_an_error_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match=r"no compiler \(no-such-compiler\): install g\+\+.*or set compile = false"):
        check(make_module())
    with pytest.raises(InputError, match=r"install g\+\+.*, or resume the run where it began, or begin a new one$"):
        check(make_module(), is_resumed=True)
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(compiler, "has_right_dropout", lambda device: False)
    assert compiler.find_obstacle(make_module(), CPU) == ""
    with pytest.raises(InputError, match=r"compiles dropout wrong.*set model\.dropout"):
        check(make_module(dropout=0.1))
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    assert "it needs PyTorch 2.13 or newer" in compiler.find_obstacle(make_module(), CPU)
    monkeypatch.setenv("CLEARHEAD_KERNELS", "plain")
    assert "CLEARHEAD_KERNELS" in compiler.find_obstacle(make_module(), CPU)


def test_the_test_of_dropout_finds_a_wrong_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    assert compiler._judge_dropout(CPU) == "passed"

    def drop_groups(x: torch.Tensor) -> torch.Tensor:
        kept = (torch.rand_like(x.transpose(1, 2)[..., ::4]) < 0.5).repeat_interleave(4, -1)
        return x.transpose(1, 2) * kept * 2.0

    monkeypatch.setattr(compiler, "_drop", drop_groups)
    assert compiler._judge_dropout(CPU) == "wrong"


def test_a_resumed_run_keeps_the_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name, texts in zip(("source", "target"), zip(*PAIRS, strict=True), strict=True):
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    table = tables("translate", run, steps=1, bleu_sentences=1)
    names = {name: str(tmp_path / name) for name in ("source", "target")}
    table["data"] |= {"train": names, "valid": names}
    ch.train(table)
    assert tomllib.loads((run / "run.toml").read_text("utf-8"))["train"]["compile"] is False
    assert ch.train(table, {"train.steps": 2}, resume=True).step == 2
    with pytest.raises(InputError, match=r"train\.compile was false, now true"):
        ch.train(table, {"train.steps": 3, "train.compile": True}, resume=True)


def test_training_on_a_cpu_imports_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("ein hund bellt\n" * 40, encoding="utf-8")
    table = {
        "task": {"kind": "generate"},
        "data": {"train": {"text": str(tmp_path / "text")}, "valid": 0.2, "max_length": 16},
        "tokenizer": {"kind": "character"},
        "model": {"layers": 1, "width": 8, "heads": 2, "feedforward": 8},
        "train": {"run": str(tmp_path / "run"), "steps": 1, "batch_tokens": 64, "device": "cpu", "snapshots": 0},
    }
    names = ("torch._dynamo", "torch._inductor", "triton", "clearhead.training.compilation")
    code = (
        f"import sys, clearhead; clearhead.train({table!r}); print([name for name in {names} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
