"""Settings that slow down a run: the pre-flight names each of them with its key and the measured factor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from clearhead.core import build
from clearhead.core.attention import Attention
from clearhead.fast.training.tree import RecomputedLayer, training_tree
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.training import preflight, slowdowns
from clearhead.training.preflight import StepCost, Trial, Workload, measure_step_cost
from clearhead.training.record import TrainSettings
from tests.training.small import ShuffledTokens, Tokens


def seconds_of(module: nn.Module) -> float:
    """Return the time of a pass on a simulated machine on which each setting has its own factor."""
    seconds = 3.0 if torch.is_autocast_enabled("cpu") else 1.0
    for submodule in module.modules():
        if isinstance(submodule, Attention) and submodule.training and submodule.dropout.p > 0.0:
            return 2.0 * seconds
        if isinstance(submodule, RecomputedLayer) and submodule.recomputes:
            seconds = max(seconds, 1.25)
    return seconds


def measure(
    monkeypatch: pytest.MonkeyPatch,
    precision: Literal["fp32", "bf16"] = "fp32",
    *,
    recomputes: bool = False,
    **rates: Any,
) -> tuple[StepCost, nn.Module]:
    clock = [0.0]
    hparams = Hyperparameters(family="decoder", layers=1, width=8, heads=2, **rates)
    plain = build(build_spec(hparams, source_vocab=13, target_vocab=13))
    module = training_tree(plain, precision, recomputes_layers=recomputes)

    def loss(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        clock[0] += seconds_of(module)
        return module(batch.ids_BT).logits.sum(), batch.num_tokens

    monkeypatch.setattr(preflight, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(slowdowns, "has_fast_bf16", lambda device: False)
    settings = TrainSettings(run="run", steps=1000, precision=precision)
    optimizer = torch.optim.AdamW(module.parameters())
    return measure_step_cost(Trial(module, optimizer, Workload(loss, ShuffledTokens()), settings)), module


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"attention_dropout": 0.2}, ["2 times, by model.attention_dropout = 0.2: "]),
        ({"recomputes": True}, ["1.2 times, by train.activation_checkpointing = true: "]),
        ({"precision": "bf16"}, ['3 times, by train.precision = "bf16": ']),
        (
            {"precision": "bf16", "attention_dropout": 0.2},
            ["2 times, by model.attention_dropout = 0.2: ", '3 times, by train.precision = "bf16": '],
        ),
    ],
)
def test_each_setting_is_named_with_its_factor(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: list[str]
) -> None:
    cost, module = measure(monkeypatch, **options)
    lines = [slowdown.line() for slowdown in cost.slowdowns]
    assert [line[: len(f"slower      {words}")] for line, words in zip(lines, expected, strict=True)] == [
        f"slower      {words}" for words in expected
    ]
    rate = options.get("attention_dropout", 0.0)
    assert all(submodule.dropout.p == rate for submodule in module.modules() if isinstance(submodule, Attention))
    assert all(submodule.recomputes for submodule in module.modules() if isinstance(submodule, RecomputedLayer))


def test_attention_that_drops_weights_in_its_kernel_needs_no_eager_one() -> None:
    """On a GPU attention dropout costs random numbers alone; `meta` takes the branches of a GPU."""
    hparams = Hyperparameters(family="decoder", layers=1, width=8, heads=2, attention_dropout=0.2)
    for device, reason in (("meta", "random number"), ("cpu", "eager attention kernel")):
        plain = build(build_spec(hparams, source_vocab=13, target_vocab=13), device=device)
        tree = training_tree(plain, "fp32")
        (suspect,) = slowdowns.find_suspects(SimpleNamespace(module=tree, precision="fp32"))
        assert reason in suspect.reason
