"""Training steps whose values the host reads one step late: the same run as with values that it reads at once.

On a CPU, the branch of CUDA runs with fused optimizers if `read_late` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import adam
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead.base.errors import RunFailure
from clearhead.base.signals import StopSignals
from clearhead.checkpoints.runs import checkpoint as files
from clearhead.checkpoints.runs.metrics import read_metrics
from clearhead.fast.training.tree import training_tree
from clearhead.tasks.train import token_loss
from clearhead.training import loop
from clearhead.training import step as training_step
from clearhead.training.loop import Trainer
from clearhead.training.optim import optimizers
from clearhead.training.optim.optimizers import build_optimizer, gradient_scale, scale_gradients
from clearhead.training.parallel.engines import TrainingEngine
from clearhead.training.parallel.processes import Processes
from clearhead.training.record import TrainSettings
from clearhead.training.step import TrainingSteps
from tests.laws.host_reads import count_host_reads, refuse_host_reads
from tests.laws.tiny import MODELS, tiny, token_batch
from tests.training.small import Falling, Tokens, equal_states, recorder, small_trainer, sum_loss, validation
from tests.training.test_loop import OneBatch


def fused_trainer(run: Path, kind: str = "adamw", **changes: Any) -> Trainer[Tokens]:
    """Return a small trainer with a fused AdamW, whose learning rate is a tensor as on CUDA, or with Muon."""
    trainer = small_trainer(run, **changes)
    if kind == "muon":
        trainer.optimizer = build_optimizer(trainer.module, kind="muon", learning_rate=1.0, weight_decay=0.01)
        return trainer
    rate = torch.tensor(1.0)
    trainer.optimizer = torch.optim.AdamW(trainer.module.parameters(), lr=rate, weight_decay=0.01, fused=True)
    return trainer


@pytest.fixture
def read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fused optimizers on a CPU take the branch of CUDA."""
    supports = "_step_supports_amp_scaling"
    monkeypatch.setattr(training_step, "updates_on_device", lambda optimizer, _: getattr(optimizer, supports, False))


@contextmanager
def read_at_once() -> Iterator[None]:
    """Return a context manager in which the host waits for each step."""
    results: Callable[..., Any] = TrainingSteps.results
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingSteps, "results", lambda self, *, waits: results(self, waits=True))
        yield


def lines(run: Path) -> list[tuple[float | None, ...]]:
    rows = read_metrics(run / "metrics.jsonl")
    return [(row.step, row.tokens, row.loss, row.learning_rate, row.valid_loss, row.valid_score) for row in rows]


@pytest.mark.usefixtures("read_late")
@pytest.mark.parametrize(("kind", "accumulate"), [("adamw", 1), ("adamw", 2), ("muon", 2)])
def test_late_reads_change_no_bit_of_a_run(tmp_path: Path, kind: str, accumulate: int) -> None:
    settings = {
        "accumulate": accumulate, "ema": 0.8, "keep": 9, "save_every": 3, "log_every": 5, "average": 2, "snapshots": 3,
    }  # fmt: skip
    late, at_once = tmp_path / "late", tmp_path / "at-once"
    trainers = [fused_trainer(run, kind, **settings) for run in (late, at_once)]
    trainers[0].run()
    with read_at_once():
        trainers[1].run()
    assert lines(late) == lines(at_once) and len(lines(late)) == 5
    reports = [[(report.step, report.loss, report.tokens) for report in recorder(t).steps] for t in trainers]
    assert reports[0] == reports[1] and len(reports[0]) == 12
    names = sorted(path.relative_to(late) for path in late.rglob("*.safetensors"))
    assert len(names) > 12
    for name in names:
        assert equal_states(files.load_tensors(late / name), files.load_tensors(at_once / name)), name
    for step in files.checkpoint_steps(late):
        states = [files.load_checkpoint(files.checkpoint_folder(run, step)).state for run in (late, at_once)]
        ignored = ("seconds", "window_seconds", "validation_seconds")
        tallies = [{key: value for key, value in state["tally"].items() if key not in ignored} for state in states]
        assert tallies[0] == tallies[1] and states[0]["batches"] == states[1]["batches"]
        # Checks of types in tests draw from Python's generator.
        assert states[0]["random"]["torch"] == states[1]["random"]["torch"]


@pytest.mark.usefixtures("read_late")
def test_a_step_is_read_after_the_next_one_is_launched(tmp_path: Path) -> None:
    trainer, launches = fused_trainer(tmp_path / "run", steps=9, validate_every=9, log_every=4, snapshots=0), []

    def count_and_compute(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        launches.append(len(recorder(trainer).steps))
        return sum_loss(module, batch)

    trainer.loss = count_and_compute
    trainer.run()
    # Before steps 5 and 9 all steps are known, because steps 4 and 8 have lines of metrics.
    assert launches == [0, 0, 1, 2, 4, 4, 5, 6, 8]


@pytest.mark.usefixtures("read_late")
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_late_run_resumes_exactly(tmp_path: Path, kind: str) -> None:
    fused_trainer(tmp_path / "whole", kind, ema=0.9).run()
    fused_trainer(tmp_path / "parts", kind, ema=0.9, steps=5).run()
    fused_trainer(tmp_path / "parts", kind, ema=0.9).run(resume=True)
    for name in (files.WEIGHTS, files.OPTIMIZER, files.AVERAGED_WEIGHTS):
        states = [files.load_tensors(tmp_path / run / "checkpoints" / "step-12" / name) for run in ("whole", "parts")]
        assert equal_states(*states)
    # The validation of step 5 came only from the end of the first run.
    assert [line for line in lines(tmp_path / "parts") if line[0] != 5] == lines(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_scaling_in_the_update_equals_scaling_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float | None, kind: str
) -> None:
    expected, actual = (fused_trainer(tmp_path / name, kind, clip=clip, accumulate=2) for name in ("early", "late"))
    expected.run()
    monkeypatch.setattr(training_step, "updates_on_device", lambda *_: True)
    actual.run()
    state = actual.module.state_dict()
    for name, value in expected.module.state_dict().items():
        assert (state[name] - value).abs().max() <= 1e-4 * value.abs().max(), name


def test_norm_and_divisor_are_those_of_the_host() -> None:
    for max_norm in (None, 0.5, 1e6):
        parameters = [nn.Parameter(torch.ones(size)) for size in (3, 17)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        before = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        norm, divisor = gradient_scale(parameters, 0.3, max_norm=max_norm)
        assert norm.dtype == torch.float64 and divisor.dtype == torch.float32
        assert float(norm) == scale_gradients(parameters, 0.3, max_norm=max_norm)
        for parameter, gradient in zip(parameters, before, strict=True):
            assert torch.allclose(gradient / divisor, parameter.grad, rtol=1e-6)


@pytest.mark.usefixtures("read_late")
@pytest.mark.parametrize(("kind", "accumulate"), [("adamw", 1), ("adamw", 3), ("muon", 3)])
@pytest.mark.parametrize("fault", ["loss became nan", "loss became inf", "norm of the gradient became nan"])
@pytest.mark.parametrize("log_every", [5, 7])
def test_a_step_that_is_not_finite_changes_nothing(
    tmp_path: Path, kind: str, accumulate: int, fault: str, log_every: int
) -> None:
    """Step 5 fails; step 6 is launched before the host knows, unless a line of metrics is due after step 5."""
    calls = 0

    def spoil(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        nonlocal calls
        calls += 1
        loss, labels = sum_loss(module, batch)
        if calls == 5 * accumulate - accumulate // 2:
            if fault.startswith("norm"):
                return loss + torch.sqrt(module.mix.bias.sum() * 0).sum() * 0, labels
            loss = loss + float(fault.split()[-1])
        return loss, labels

    settings = {"accumulate": accumulate, "log_every": log_every, "validate_every": 100, "ema": 0.9, "snapshots": 0}
    trainer = fused_trainer(tmp_path / "run", kind, loss=spoil, **settings)
    is_in_batch = accumulate > 1 and fault.startswith("loss")
    where = f"step 5{f' in batch {accumulate - accumulate // 2} of {accumulate}' if is_in_batch else ''}, so"
    with pytest.raises(RunFailure, match=rf"The {fault} at {where} training stopped.*step-0"):
        trainer.run()
    assert calls == (5 if log_every == 5 else 6) * accumulate
    fine = fused_trainer(tmp_path / "fine", kind, steps=4, **settings)
    fine.run()
    assert equal_states(trainer.module.state_dict(), fine.module.state_dict())
    states = [trainer.optimizer.state_dict()["state"], fine.optimizer.state_dict()["state"]]
    assert all(equal_states(states[0][index], states[1][index]) for index in states[1])
    assert files.checkpoint_steps(tmp_path / "run") == [0]


@pytest.mark.usefixtures("read_late")
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_no_step_reads_the_host_between_two_lines_of_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    take, read_results, reads = TrainingSteps.take, TrainingSteps.results, []

    def take_counted(steps: TrainingSteps[Any], step: int) -> Any:
        # The values of the step before are read afterwards: an event has brought them to pinned memory.
        steps.results = lambda waits: []  # type: ignore[method-assign]
        with count_host_reads() as counted:
            take(steps, step)
        reads.append(counted)
        steps.results = partial(read_results, steps)  # type: ignore[method-assign]
        return steps.results(waits=False)

    monkeypatch.setattr(TrainingSteps, "take", take_counted)
    fused_trainer(tmp_path / "run", kind, accumulate=2, ema=0.9).run()
    assert reads == [[]] * 12


class Casts(TorchDispatchMode):
    """Counts the casts of each parameter to bf16."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.counts = {parameter.data_ptr(): 0 for parameter in module.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a cast."""
        values = kwargs or {}
        if func is torch.ops.aten._to_copy.default and values.get("dtype") == torch.bfloat16:
            address = args[0].data_ptr()
            if address in self.counts:
                self.counts[address] += 1
        return func(*args, **values)


def test_a_weight_is_cast_once_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take, counts = TrainingSteps.take, []

    def take_counted(steps: TrainingSteps[Any], step: int) -> Any:
        with Casts(steps.module) as casts:
            results = take(steps, step)
        counts.append(max(casts.counts.values()))
        return results

    monkeypatch.setattr(TrainingSteps, "take", take_counted)
    small_trainer(tmp_path / "run", accumulate=3, precision="bf16").run()
    assert counts == [1] * 12


def test_throughput_counts_the_time_between_lines_without_validations_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    def wait_and_validate(module: nn.Module) -> Any:
        wait(100.0)
        return validation(module)

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now))
    trainer = small_trainer(
        tmp_path / "run", steps=8, log_every=2, validate=wait_and_validate, save_every=2, snapshots=0
    )
    report = trainer.progress.step

    def wait_and_report(*args: Any) -> None:
        wait(2.0)
        report(*args)

    trainer.progress.step = wait_and_report  # type: ignore[method-assign]
    trainer.run()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    before = [0, *(row.tokens for row in rows)]
    spent = [(row.tokens - tokens) / row.tokens_per_second for tokens, row in zip(before, rows, strict=False)]
    # The pause after a step counts in the next step; after the last step before a save, it does not.
    assert spent == [pytest.approx(2.0, rel=1e-2)] * 4


def test_the_built_optimizer_is_fused(tmp_path: Path) -> None:
    for kind in ("adam", "adamw", "muon"):
        optimizer = build_optimizer(small_trainer(tmp_path).module, kind=kind, learning_rate=0.1)  # type: ignore[arg-type]
        assert training_step.updates_on_device(optimizer, torch.device("cuda"))
        assert not training_step.updates_on_device(optimizer, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("name", [name for name in MODELS if "/pre-grouped/" in name])
def test_a_whole_step_runs_on_meta(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of meta take the branches of a GPU, and every host read raises."""
    monkeypatch.setattr(adam, "_device_dtype_check_for_fused", lambda *_: None)
    # The kernel of the update has no form for meta.
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *_, **named: None)
    monkeypatch.setattr(training_step, "updates_on_device", lambda *_: True)
    monkeypatch.setattr(TrainingSteps, "results", lambda self, *, waits: [])
    monkeypatch.setattr(training_step, "HostCopy", lambda values: values)
    tree = training_tree(tiny(name).to("meta"), "fp32")
    batch = token_batch(name).to("meta")
    if kind == "muon":
        monkeypatch.setattr(optimizers, "_can_fuse", lambda _: True)
        optimizer = build_optimizer(tree, kind="muon", learning_rate=0.1)
    else:
        optimizer = torch.optim.AdamW(tree.parameters(), fused=True)
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    steps = TrainingSteps(
        module=tree,
        optimizer=optimizer,
        schedule=Falling(),
        batches=OneBatch([batch]),  # type: ignore[arg-type]
        settings=TrainSettings(run=str(tmp_path), steps=3, accumulate=2, clip=1.0, ema=0.9),
        processes=Processes(),
        engine=TrainingEngine(tree, partial(token_loss, label_smoothing=0.1)),
        signals=StopSignals(),
        seconds=lambda: 0.0,
        last_good=lambda: tmp_path,
    )
    steps.device = torch.device("cuda")  # autocast does not know meta
    steps.take(1)  # also copies tables of positions to the device, once
    with refuse_host_reads():
        assert steps.take(2) == []
