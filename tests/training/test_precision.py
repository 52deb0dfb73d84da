"""The precision that "auto" turns out to be: tried by a batch, written into the run file, kept by a resumed run."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.base.errors import InputError
from clearhead.training import assemble, preflight
from clearhead.training.preflight import Workload, faster_precision
from clearhead.training.runfile.sections import Train
from tests.model.test_training import PAIRS, tables
from tests.training.small import NextToken, ShuffledTokens, Tokens, sum_loss

Precision = Literal["auto", "fp32", "bf16"]


class Timed:
    """A loss that takes longer in one precision, by a clock of its own, and counts its calls."""

    def __init__(self, slow: str) -> None:
        self.slow, self.calls, self.clock = slow, 0, 0.0

    def perf_counter(self) -> float:
        return self.clock

    def __call__(self, module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        self.calls += 1
        if ("bf16" if torch.is_autocast_enabled("cpu") else "fp32") == self.slow:
            self.clock += 0.2
        return sum_loss(module, batch)


def choose(monkeypatch: pytest.MonkeyPatch, loss: Timed, precision: Precision = "auto", least: int = 0) -> str:
    monkeypatch.setattr(preflight, "has_fast_bf16", lambda device: True)
    monkeypatch.setattr(preflight, "LEAST_PRODUCTS", least)
    monkeypatch.setattr(preflight, "time", loss)
    batches, module = ShuffledTokens(), NextToken()
    position, random = batches.state(), torch.get_rng_state()
    chosen = faster_precision(module, Workload(loss, batches), Train(run="run", precision=precision))
    assert batches.state() == position and torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in module.parameters())
    return chosen


@pytest.mark.parametrize(("slow", "expected"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_auto_is_what_a_batch_computes_faster(monkeypatch: pytest.MonkeyPatch, slow: str, expected: str) -> None:
    assert choose(monkeypatch, Timed(slow)) == expected


def test_a_named_precision_and_a_small_model_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = Timed("fp32")
    assert choose(monkeypatch, loss, "fp32") == "fp32" and choose(monkeypatch, loss, "bf16") == "bf16"
    assert choose(monkeypatch, loss, least=10**6) == "fp32"
    assert loss.calls == 0


def test_the_run_file_names_the_precision_and_a_resumed_run_keeps_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, chosen = tmp_path / "run", ["bf16"]
    monkeypatch.setattr(assemble, "faster_precision", lambda *_: chosen.pop())  # a second choice would fail
    for name, texts in zip(("source", "target"), zip(*PAIRS, strict=True), strict=True):
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    table = tables("translate", run, steps=1, bleu_sentences=1)
    names = {name: str(tmp_path / name) for name in ("source", "target")}
    table["data"] |= {"train": names, "valid": names}
    ch.train(table)
    assert tomllib.loads((run / "run.toml").read_text("utf-8"))["train"]["precision"] == "bf16"
    assert ch.train(table, {"train.steps": 2}, resume=True).step == 2
    assert tomllib.loads((run / "run.toml").read_text("utf-8"))["train"]["precision"] == "bf16"
    with pytest.raises(InputError, match="precision"):
        ch.train(table, {"train.steps": 3, "train.precision": "fp32"}, resume=True)
