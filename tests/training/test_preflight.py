"""Checks before the first step: one report has every fault, and the checks change nothing."""

from __future__ import annotations

import gc
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from clearhead.base.errors import InputError
from clearhead.base.printing import human_bytes
from clearhead.base.progress import Display
from clearhead.checkpoints.runs import checkpoint as files
from clearhead.core import Transformer, build
from clearhead.fast.memory import forecast_memory
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.presets.named import PRESETS
from clearhead.training import preflight as module_under_test
from clearhead.training.optim.optimizers import build_optimizer
from clearhead.training.preflight import (
    CHECKPOINT_SPEED,
    StepCost,
    Trial,
    Workload,
    disk_forecast,
    measure_step_cost,
    preflight,
)
from clearhead.training.record import TrainSettings
from clearhead.training.task_setup import DataSide
from tests.training.small import NextToken, ShuffledTokens, Tokens, small_trainer, sum_loss


def side(**changes: Any) -> DataSide:
    fitting = {"name": "source", "largest_id": 12, "longest": 11, "special_ids": {"pad": 0, "eos": 12}}
    return DataSide(**(fitting | changes))


def model(max_positions: int | None = 11) -> Transformer:
    """Return a model with 13 token ids on both sides."""
    positions: dict[str, Any] = {"positions": "rotary"}
    if max_positions is not None:
        positions = {"positions": "learned", "max_positions": max_positions}
    hparams = Hyperparameters(layers=1, width=8, heads=2, **positions)
    return build(build_spec(hparams, source_vocab=13, target_vocab=13))


def check(run: Path, *sides: DataSide, **settings: Any) -> module_under_test.Preflight:
    run.mkdir(exist_ok=True)
    module = NextToken()
    return preflight(
        Trial(
            module,
            torch.optim.AdamW(module.parameters()),
            Workload(sum_loss, ShuffledTokens(), valid_share=0.2),
            TrainSettings(run=str(run), **({"steps": 40, "validate_every": 15} | settings)),
        ),
        faults=[fault for each in sides or (side(),) for fault in each.faults(model())],
    )


def cost_of(
    module: nn.Module,
    loss: Callable[[nn.Module, Tokens], tuple[Tensor, int]],
    optimizer: torch.optim.Optimizer | None = None,
    batches: ShuffledTokens | None = None,
    **work: Any,
) -> StepCost:
    optimizer = torch.optim.AdamW(module.parameters()) if optimizer is None else optimizer
    settings = TrainSettings(run="run", steps=1, clip=1.0)
    return measure_step_cost(Trial(module, optimizer, Workload(loss, batches or ShuffledTokens(), **work), settings))


def test_what_fits_passes_and_costs_are_foretold(tmp_path: Path) -> None:
    report = check(tmp_path / "run", accumulate=2)
    parameters = 13 * 7 + 7 * 7 + 7
    assert report.parameters == parameters
    assert report.checkpoint_bytes == 4 * parameters * 3
    assert report.disk_bytes == report.checkpoint_bytes * 5 + 4 * parameters * report.snapshots[0]
    assert report.disk_free > report.disk_bytes and report.memory_bytes >= 2 * 4 * parameters
    assert "snapshots" not in "".join(report.lines())
    few = replace(report, snapshots=(3, 10)).lines()
    assert "snapshots   3 and not 10, because of train.snapshot_megabytes" in few
    assert report.validations == 3  # after steps 15, 30 and 40
    cost = report.cost
    assert cost.step_seconds > 0 and cost.validation_seconds > report.checkpoint_bytes / CHECKPOINT_SPEED
    assert report.seconds == pytest.approx(40 * cost.step_seconds + 3 * cost.validation_seconds)
    text = "\n".join(report.lines())
    for words in ("147", "a checkpoint", "free", "a step", "a validation", "for 40 steps with 3 validations"):
        assert words in text
    assert check(tmp_path / "run", steps=None, seconds=3.0).seconds is None
    for limit, is_said in ((1e-6, True), (1e6, False)):
        limited = "\n".join(check(tmp_path / "run", seconds=limit).lines())
        assert ("train.seconds stops the run after" in limited) == is_said


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_contents_of_memory_are_those_of_a_step(
    tmp_path: Path, is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = model()
    module.head.requires_grad_(not is_frozen)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def loss(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        return torch.stack([weight.square().sum() for weight in trained]).sum(), 1

    def adamw() -> torch.optim.Optimizer:
        return torch.optim.AdamW(trained)

    work, settings = Workload(loss, ShuffledTokens()), TrainSettings(run=str(tmp_path), steps=3)
    assert not preflight(Trial(module, adamw(), work, settings)).forecasts, "a small model fits everywhere"
    monkeypatch.setattr(module_under_test, "LARGE_MODEL", 0)
    report = preflight(Trial(module, adamw(), work, settings))
    optimizer = adamw()
    loss(module, next(work.batches))[0].backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert report.weights == {"float32": sum(weight.nbytes for weight in (*module.parameters(), *module.buffers()))}
    assert report.gradient_bytes == sum(weight.grad.nbytes for weight in trained if weight.grad is not None)
    assert report.cost.state_bytes == sum(value.nbytes for value in states)
    assert report.forecasts == forecast_memory(module.spec, is_mapped=False)
    lines = report.lines()
    (contents,) = [line for line in lines if line.startswith("contents    weights ")]
    assert human_bytes(report.gradient_bytes) in contents and human_bytes(report.cost.state_bytes) in contents
    assert [line for line in lines if line.startswith("trained")] == [
        f"trained     {forecast.precision}: {forecast.summary()}" for forecast in report.forecasts
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"largest_id": 13}, r"token id 13, but the model's source vocabulary ends at 12"),
        ({"longest": 12}, r"longest source has 12 tokens, but the model has 11 positions: lower data.max_length to 11"),
        ({"special_ids": {"end": 13}}, r"id for end is 13, but the ids of the model's vocabulary end at 12"),
        ({"special_ids": {"pad": -1}}, r"id for pad is -1"),
    ],
)
def test_a_side_that_does_not_fit_is_said(changes: dict[str, Any], words: str) -> None:
    assert side().faults(model()) == side(longest=10**6).faults(model(max_positions=None)) == []
    (fault,) = side(**changes).faults(model())
    assert re.search(words, fault)


def test_all_faults_come_in_one_report(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        check(tmp_path / "run", side(largest_id=40, longest=99), side(name="target", largest_id=50))
    message = str(caught.value)
    for words in ("3 faults", "id 40", "99 tokens", "target data has the token id 50"):
        assert words in message


def test_too_little_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 5000})
    monkeypatch.setattr(module_under_test.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InputError, match=r"need up to 14\.7 kB, but the disk .* has 5\.0 kB free: free some space"):
        check(tmp_path / "run")
    monkeypatch.setattr(usage, "free", 6000)
    assert check(tmp_path / "run", keep=1, snapshots=1).disk_free == 6000


def test_the_room_that_a_run_holds_already_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 5000})
    small_trainer(tmp_path / "run", steps=12, average=3).run()
    held = {path.stat().st_ino: path.stat().st_size for path in (tmp_path / "run/checkpoints").rglob("*.*")}
    monkeypatch.setattr(module_under_test.shutil, "disk_usage", lambda path: usage)
    folders = {path.stat().st_ino for path in (tmp_path / "run/checkpoints").rglob("*") if path.is_dir()}
    expected = 5000 + sum(count for inode, count in held.items() if inode not in folders)
    assert check(tmp_path / "run").disk_free == expected


@pytest.mark.parametrize("options", [{}, {"ema": 0.9}, {"ema": 0.9, "average": 3, "keep": 2}])
def test_the_disk_forecast_covers_what_a_run_really_keeps(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = small_trainer(tmp_path / "run", validate_every=2, **options)
    checkpoint, whole = disk_forecast(trainer.module, trainer.settings)
    trainer.run()

    def tensor_bytes(folder: Path) -> int:
        # By inode, as recent weights share their bytes; each file starts with the length of its header
        paths = {path.stat().st_ino: path for path in folder.rglob("*.safetensors")}.values()
        return sum(path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little") for path in paths)

    # The average holds the tied table of this module under both of its names
    tied_twice = 4 * 13 * 7 if "ema" in options else 0
    assert tensor_bytes(files.checkpoint_folder(tmp_path / "run", 12)) == pytest.approx(
        checkpoint + tied_twice, rel=0.02
    )
    assert 0.5 * whole < tensor_bytes(tmp_path / "run" / "checkpoints") <= whole


def test_too_little_memory_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "free_memory", lambda device: 1000)
    with pytest.raises(InputError, match=r"of memory, but only 1\.0 kB is free: lower train\.batch_tokens"):
        check(tmp_path / "run")


def test_a_dry_step_changes_nothing() -> None:
    class Counting(NextToken):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(3))

        def forward(self, ids_BT: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(ids_BT)

    module = Counting().eval()
    module.mix.train()
    module(torch.tensor([[1, 2]])).sum().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    values = {name: value.clone() for name, value in module.state_dict().items()}
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    optimizer = build_optimizer(module, kind="muon", learning_rate=0.1, weight_decay=0.1)
    groups = [dict(group) for group in optimizer.param_groups]
    batches = ShuffledTokens()
    next(batches)
    position = batches.state()
    seen = []

    def loss(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        seen.append((module.training, torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()))
        random.random(), np.random.rand()
        return sum_loss(module, batch)

    cost = cost_of(module, loss, optimizer, batches)
    assert cost.step_seconds > 0 and cost.validation_seconds == 0 and cost.memory_bytes >= 0
    assert set(seen) == {(True, True, True), (False, False, True)}
    assert batches.state() == position and not optimizer.state
    assert all(group == before for group, before in zip(optimizer.param_groups, groups, strict=True))
    assert all(parameter.grad is gradients[name] for name, parameter in module.named_parameters())
    assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())
    assert torch.equal(before[0], torch.get_rng_state()) and before[2] == np.random.get_state()[1].tolist()
    assert (module.training, module.mix.training, module.dropout.training) == (False, True, False)


def test_a_dry_step_measures_memory() -> None:
    """The forecast contains 64 MB of activations, despite the memory that the process already has."""

    def hungry(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        loss, labels = sum_loss(module, batch)
        return loss + 0 * torch.ones(16_000_000).mul(loss.detach()).sum(), labels

    assert 40e6 < cost_of(NextToken(), hungry).memory_bytes < 400e6


class SlowMachine(Display):
    """A simulated clock with fixed times of forward, backward and update; records the lines shown."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.clock, self.calls = seconds, 0.0, Counter[str]()
        self.lines: list[tuple[float, str]] = []

    def perf_counter(self) -> float:
        return self.clock

    def message(self, text: str) -> None:
        self.lines.append((self.clock, text))

    def spend(self, name: str) -> None:
        self.clock += self.seconds[name]
        self.calls[name] += 1

    def loss(self, module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        self.spend("forward")
        loss, labels = sum_loss(module, batch)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: self.spend("backward"))
        return loss, labels

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(module.parameters())
        optimizer.register_step_pre_hook(lambda *_: self.spend("update"))
        return optimizer


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("num_sizes", [1, 41])
@pytest.mark.parametrize("scale", [0.1, 1.0, 14.0])
def test_a_slow_step_is_measured_once_and_in_the_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scale: float, num_sizes: int, accumulate: int
) -> None:
    """The pre-flight takes at most a second, 3 steps or 5 % of the run, and shows a line before each measurement."""
    machine, module = SlowMachine(forward=0.3 * scale, backward=0.6 * scale, update=0.1 * scale), NextToken()
    monkeypatch.setattr(module_under_test, "time", machine)
    monkeypatch.setattr(module_under_test, "needs_kernels", lambda device, precision: True)
    batches, steps = ShuffledTokens(num_batches=1 if num_sizes == 1 else 5), 20
    largest = next(batches) if num_sizes > 1 else None
    work = Workload(machine.loss, batches, largest=largest, num_sizes=num_sizes, valid_share=0.2)
    settings = TrainSettings(run=str(tmp_path), steps=steps, accumulate=accumulate)
    report = preflight(Trial(module, machine.optimizer(module), work, settings), display=machine)
    step = (0.9 * accumulate + 0.1) * scale
    assert report.cost.step_seconds == pytest.approx(step)
    assert machine.clock <= max(1.0, 3 * step, 0.05 * steps * step)
    assert machine.lines[0][0] == 0.0 and "largest batch" in machine.lines[0][1]
    times = [time for time, _ in machine.lines]
    words = " ".join(text for _, text in machine.lines)
    for measurement in ("passes", "a validation", "an update"):
        assert measurement in words
    if scale == 14.0:
        most = max(later - time for time, later in itertools.pairwise([*times, machine.clock]))
        assert most < 0.91 * scale  # no line stands for more than one pass
        assert machine.calls["update"] == 1
        if accumulate == 1:  # else there is time for more sizes
            assert machine.calls["forward"] == 2 + (num_sizes > 1)


@pytest.mark.parametrize("disturbance", [0.0, 0.5])
def test_time_counts_batches_optimizer_and_validation(monkeypatch: pytest.MonkeyPatch, disturbance: float) -> None:
    """Passes of 20 ms forward and 10 ms backward, an optimizer of 30 ms, half an epoch and 0.4 s of validation.

    If another program slows down every second measurement, the forecast is the same.
    """
    clock, calls = [0.0], {"forward": 0, "update": 0}
    monkeypatch.setattr(module_under_test, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def pass_time(seconds: float, name: str = "") -> None:
        clock[0] += seconds
        if name:
            clock[0] += disturbance * (calls[name] % 2)
            calls[name] += 1

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Tensor) -> Tensor:
            pass_time(0.02, "forward")
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            pass_time(0.01)
            return gradient

    class SlowAdamW(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            pass_time(0.03, "update")
            super().step(closure)

    def slow(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        loss, labels = sum_loss(module, batch)
        return Slow.apply(loss), labels

    module = NextToken()
    optimizer = SlowAdamW(module.parameters())
    settings = TrainSettings(run="run", steps=10**5, accumulate=3)
    work = Workload(slow, ShuffledTokens(), valid_share=0.5, score_seconds=lambda module: 0.4)
    cost = measure_step_cost(Trial(module, optimizer, work, settings))
    assert cost.step_seconds == pytest.approx(3 * 0.03 + 0.03)
    assert cost.validation_seconds == pytest.approx(0.4 + 2.5 * 0.02)


def test_garbage_of_before_hides_no_memory_of_a_dry_step() -> None:
    gc.disable()
    ring: list[object] = [torch.ones(75_000_000)]
    ring.append(ring)
    del ring

    def hungry(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        gc.collect()
        loss, labels = sum_loss(module, batch)
        return loss + 0 * torch.ones(16_000_000).mul(loss.detach()).sum(), labels

    try:
        assert 40e6 < cost_of(NextToken(), hungry).memory_bytes < 400e6
    finally:
        gc.enable()


def test_a_batch_that_does_not_fit_into_memory_is_said() -> None:
    def greedy(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        return torch.empty(2**50, dtype=torch.uint8).sum(), 1

    with pytest.raises(InputError, match=r"largest batch \(\d+ tokens\) does not fit into memory"):
        cost_of(NextToken(), greedy)


def test_other_errors_of_a_dry_step_are_not_hidden() -> None:
    def broken_loss(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        cost_of(NextToken(), broken_loss)


def test_a_model_that_cannot_be_trained_here_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_spec(PRESETS["transformer"], source_vocab=7, target_vocab=7)
    count = sum(parameter.numel() for parameter in build(model, device="meta").parameters())
    monkeypatch.setattr(module_under_test, "free_memory", lambda device: 16 * count)
    module_under_test.refuse_large(model, torch.device("cpu"), is_trained_whole=True)
    monkeypatch.setattr(module_under_test, "free_memory", lambda device: 16 * count - 1)
    module_under_test.refuse_large(model, torch.device("cpu"), is_trained_whole=False)
    with pytest.raises(InputError, match=f"Training {count:,} parameters needs about .* lower model.layers"):
        module_under_test.refuse_large(model, torch.device("cpu"), is_trained_whole=True)
