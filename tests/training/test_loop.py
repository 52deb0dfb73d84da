"""The trainer: accumulation, clipping, limits, best checkpoints, averages, signals and failures."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from clearhead.base.errors import InputError, RunFailure
from clearhead.base.signals import Interrupted
from clearhead.checkpoints.reference import ModelReference
from clearhead.checkpoints.runs import checkpoint as files
from clearhead.checkpoints.runs.directory import find_weights, open_run
from clearhead.checkpoints.runs.metrics import MetricsRow, read_metrics
from clearhead.generate.scoring.result import Validation
from clearhead.training.loop import Trainer
from clearhead.training.record import TrainSettings, planned_steps
from clearhead.training.runfile.sections import EarlyStop
from tests.training.small import (
    Falling,
    NextToken,
    ShuffledTokens,
    Tokens,
    equal_states,
    recorder,
    small_trainer,
    sum_loss,
    validation,
)


def weights(run: Path, step: int, name: str = files.WEIGHTS) -> dict[str, Tensor]:
    return files.load_tensors(files.checkpoint_folder(run, step) / name)


def test_a_run_leaves_checkpoints_metrics_plots_and_the_best(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path / "run", keep=2, plots=True)
    result = trainer.run()
    run = tmp_path / "run"
    assert (result.run, result.step, result.best, result.reason) == (run, 12, "step-12", "all 12 steps are done")
    assert files.checkpoint_steps(run) == [8, 12]
    assert (run / "best").read_text() == "step-12\n"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 4, 6, 8, 9, 12]
    assert [row["step"] for row in rows if row["valid_loss"] is not None] == [4, 8, 12]
    keys = [field.name for field in fields(MetricsRow)]
    assert all(list(row) == keys for row in rows)
    assert [path.name for path in sorted((run / "plots").iterdir())] == ["learning_rate.png", "loss.png", "score.png"]
    assert not (run / "lock").exists()
    assert equal_states(weights(run, 12), trainer.module.state_dict())
    assert recorder(trainer).ended == 1 and len(recorder(trainer).steps) == 12


def test_the_loss_of_a_line_is_the_mean_per_label_since_the_line_before(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path / "run", accumulate=2)
    trainer.run()
    batches = ShuffledTokens()
    labels = [sum(next(batches).labels_BT.numel() for _ in range(2)) for _ in range(12)]
    steps = recorder(trainer).steps
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for before, row in zip([0, *[row.step for row in rows]], rows, strict=False):
        window = range(before, row.step)
        expected = sum(steps[i].loss * labels[i] for i in window) / sum(labels[i] for i in window)
        assert row.loss == pytest.approx(expected, rel=1e-6)
    assert rows[-1].tokens == sum(report.tokens for report in steps)


class OneBatch:
    """The same batches over and over, given one by one or joined into one."""

    batches_per_epoch = 1

    def __init__(self, batches: list[Tokens]) -> None:
        self.batches, self.position = batches, 0

    def __next__(self) -> Tokens:
        self.position += 1
        return self.batches[(self.position - 1) % len(self.batches)]

    def state(self) -> dict[str, Any]:
        return {"place": self.position}

    def load_state(self, state: dict[str, Any]) -> None:
        self.position = state["place"]


@pytest.mark.parametrize("clip", [None, 0.05])
def test_accumulated_batches_equal_one_batch(tmp_path: Path, clip: float | None) -> None:
    """Counted by tokens: the parts have 3, 7 and 11 rows, of which some positions carry no loss."""
    torch.manual_seed(5)
    ids = torch.randint(0, 13, (21, 6))

    def some_labels(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        chosen = batch.labels_BT % 3 != 0
        logits_NV = module(batch.ids_BT)[chosen]
        return nn.functional.cross_entropy(logits_NV, batch.labels_BT[chosen], reduction="sum"), int(chosen.sum())

    def train(name: str, parts: list[Tensor]) -> dict[str, Tensor]:
        settings = {"steps": 3, "accumulate": len(parts), "clip": clip}
        trainer = small_trainer(tmp_path / name, loss=some_labels, **settings)
        trainer.module.dropout.p = 0.0  # type: ignore[union-attr]
        # Plain descent, so that a wrong scale of the gradient cannot hide
        trainer.optimizer = torch.optim.SGD(trainer.module.parameters(), lr=1.0)
        trainer.schedule.first = 3.0  # type: ignore[attr-defined]
        trainer.batches = OneBatch([Tokens(ids_part[:, :-1], ids_part[:, 1:]) for ids_part in parts])
        trainer.run()
        return {name: value.clone() for name, value in trainer.module.state_dict().items()}

    whole = train("whole", [ids])
    parts = train("parts", list(ids.split([3, 7, 11])))
    first = train("first", [ids[:3]])
    for name, value in whole.items():
        assert (value - parts[name]).abs().max() / value.abs().max() < 1e-5
    assert (whole["mix.weight"] - first["mix.weight"]).abs().max() > 1e-3


def test_the_gradient_is_clipped_to_the_norm(tmp_path: Path) -> None:
    norms = []

    class Watch(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    for name, clip in (("free", None), ("clipped", 0.25)):
        trainer = small_trainer(tmp_path / name, steps=2, clip=clip)
        trainer.optimizer = Watch(trainer.module.parameters(), lr=1.0)
        trainer.run()
    assert min(norms[:2]) > 0.3
    assert norms[2:] == pytest.approx([0.25, 0.25], rel=1e-5)


def test_the_schedule_sets_the_learning_rate(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path / "run", steps=3)
    trainer.run()
    assert trainer.optimizer.param_groups[0]["lr"] == trainer.schedule(3)
    assert recorder(trainer).steps[-1].learning_rate == trainer.schedule(3)


@pytest.mark.parametrize(
    ("limits", "batches_per_epoch", "expected"),
    [
        ({"steps": 7}, 5, 7),
        ({"epochs": 2.0}, 5, 10),
        ({"epochs": 2.0, "accumulate": 3}, 5, 4),
        ({"epochs": 0.01}, 5, 1),
        ({"steps": 7, "epochs": 1.0}, 5, 5),
        ({"seconds": 9.0}, 5, None),
    ],
)
def test_the_first_limit_counts(limits: dict[str, Any], batches_per_epoch: int, expected: int | None) -> None:
    assert planned_steps(TrainSettings(run="run", **limits), batches_per_epoch) == expected


def test_a_run_of_epochs_ends_after_them(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path / "run", steps=None, epochs=2.0)
    assert trainer.run().step == 10
    assert trainer.batches.state() == {"epoch": 2, "place": 0}


@pytest.mark.parametrize("steps", [None, 10**6])
def test_seconds_end_a_run_early_validated_and_it_stays_ended(tmp_path: Path, steps: int | None) -> None:
    trainer = small_trainer(tmp_path / "run", steps=steps, seconds=0.3, validate_every=10**6)
    result = trainer.run()
    assert result.reason == "the time limit of 300 ms is reached" and result.best == f"step-{result.step}"
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1].step == result.step and rows[-1].valid_loss is not None
    assert [row.step for row in rows] == sorted({row.step for row in rows})
    assert small_trainer(tmp_path / "run", steps=steps, seconds=0.3).run(resume=True).step == result.step


def test_a_resumed_run_forecasts_its_validations_by_the_one_before(tmp_path: Path) -> None:
    """The time of which stands in the checkpoint; before the first it is that of the forecast."""
    parts = [small_trainer(tmp_path / "run", steps=steps) for steps in (3, 6)]
    parts[0].validation_seconds = 100.0
    parts[0].run()
    parts[1].run(resume=True)
    first, again = (recorder(stage).plans[0].validation_seconds for stage in parts)
    assert first == 100.0 and 0 < again < 100.0


def test_impossible_settings_are_all_named() -> None:
    with pytest.raises(ValidationError) as caught:
        TrainSettings(run="run", accumulate=0, clip=-1.0, ema=1.0, keep=0, early_stop={"patience": 0})
    for word in ("accumulate", "clip", "ema", "keep", "patience"):
        assert word in str(caught.value)


def script_validation(values: list[float], *, metric: str = "loss") -> Any:
    remaining = list(values)

    def validate(module: nn.Module) -> Validation:
        value = remaining.pop(0)
        return Validation(value) if metric == "loss" else Validation(1.0, score=value)

    return validate


@pytest.mark.parametrize(
    ("metric", "values"), [("loss", [5.0, 3.0, 4.0, 3.0, 1.0]), ("score", [5.0, 7.0, 6.0, 7.0, 9.0])]
)
def test_patience_ends_a_run_that_no_longer_improves(tmp_path: Path, metric: Any, values: list[float]) -> None:
    trainer = small_trainer(
        tmp_path / "run",
        validate=script_validation(values, metric=metric),
        early_stop=EarlyStop(metric=metric, patience=2),
        steps=1000,
        validate_every=2,
        keep=1,
    )
    result = trainer.run()
    assert (result.step, result.best, result.best_value) == (8, "step-4", values[1])
    assert result.reason == f"early stopping: 2 validations in a row without a better {metric}"
    assert files.checkpoint_steps(tmp_path / "run") == [4, 8]
    assert [report.is_best for report in recorder(trainer).validations] == [True, True, False, False]


def test_the_schedule_hears_every_validation_once(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path / "run", validate=script_validation([3.0, 2.0, 1.0]))
    trainer.run()
    assert trainer.schedule.state() == {"observed": [3.0, 2.0, 1.0]}


def test_a_score_that_decides_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(RunFailure, match="choose by loss"):
        small_trainer(tmp_path / "run", validate=script_validation([1.0]), best_by="score").run()


def test_validation_leaves_no_trace_in_the_weights(tmp_path: Path) -> None:
    seen = []

    def nosy(module: nn.Module) -> Validation:
        assert not module.training and not torch.is_grad_enabled()
        seen.append(1)
        return validation(module)

    often, seldom = (small_trainer(tmp_path / str(n), validate=nosy, validate_every=n, ema=0.7) for n in (2, 12))
    often.run(), seldom.run()
    assert len(seen) == 7 and often.module.training
    assert equal_states(often.module.state_dict(), seldom.module.state_dict())


def test_validation_measures_the_exponential_average(tmp_path: Path) -> None:
    measured = []

    def keep(module: nn.Module) -> Validation:
        measured.append({name: value.clone() for name, value in module.state_dict().items()})
        return validation(module)

    small_trainer(tmp_path / "run", validate=keep, ema=0.8).run()
    average = NextToken()
    average.load_state_dict(files.load_tensors(find_weights(ModelReference(tmp_path / "run", "last"))))
    assert equal_states(average.state_dict(), measured[-1])
    assert not equal_states(weights(tmp_path / "run", 12), measured[-1])


@pytest.mark.parametrize("ema", [None, 0.5])
def test_the_last_validated_weights_are_averaged(tmp_path: Path, ema: float | None) -> None:
    """Three are averaged though only one checkpoint is kept."""
    measured = []

    def keep(module: nn.Module) -> Validation:
        measured.append({name: value.clone() for name, value in module.state_dict().items()})
        return validation(module)

    trainer = small_trainer(tmp_path / "run", validate=keep, validate_every=3, average=3, keep=1, ema=ema)
    result = trainer.run()
    averaged = files.load_tensors(find_weights(ModelReference(tmp_path / "run", "averaged")))
    assert result.averaged is not None and len(measured) == 5
    for name, value in averaged.items():
        expected = torch.stack([state[name].double() for state in measured[1:4]]).mean(0)
        assert (value.double() - expected).abs().max() / expected.abs().max() < 1e-6
        assert torch.equal(value, measured[4][name]), "the average itself is validated"
    assert equal_states(weights(tmp_path / "run", 12), trainer.module.state_dict())
    again = small_trainer(
        tmp_path / "run", validate=script_validation([]), validate_every=3, average=3, keep=1, ema=ema
    )
    assert again.run(resume=True).averaged == result.averaged, "a finished run is not measured again"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_at_once(tmp_path: Path, value: float) -> None:
    calls = []

    def poisoned_loss(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        calls.append(1)
        loss, labels = sum_loss(module, batch)
        return (loss * value if len(calls) == 14 else loss), labels

    trainer = small_trainer(tmp_path / "run", loss=poisoned_loss, accumulate=2)
    with pytest.raises(RunFailure, match=rf"loss became {value} at step 7 in batch 2 of 2.*step-4"):
        trainer.run()
    assert files.find_newest_undamaged(tmp_path / "run") == (files.checkpoint_folder(tmp_path / "run", 4), [])
    assert all(value.isfinite().all() for value in trainer.module.state_dict().values())
    assert recorder(trainer).ended == 1 and not (tmp_path / "run" / "lock").exists()


def test_a_gradient_that_is_not_finite_stops_before_the_weights_are_spoiled(tmp_path: Path) -> None:
    def steep(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        loss, labels = sum_loss(module, batch)
        return loss + torch.sqrt(module.mix.bias.sum() * 0).sum() * 0, labels

    trainer = small_trainer(tmp_path / "run", loss=steep, clip=None)
    with pytest.raises(RunFailure, match="norm of the gradient became nan at step 1"):
        trainer.run()
    assert all(value.isfinite().all() for value in trainer.module.state_dict().values())


def test_a_validation_loss_that_is_not_finite_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunFailure, match="validation loss became nan at step 8"):
        small_trainer(tmp_path / "run", validate=script_validation([1.0, float("nan")])).run()
    assert files.checkpoint_steps(tmp_path / "run") == [0, 4]


def test_running_out_of_memory_says_what_to_do(tmp_path: Path) -> None:
    def greedy(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    with pytest.raises(RunFailure, match=r"Memory ran out at step 1, on a batch of \d+ tokens.*smaller batches"):
        small_trainer(tmp_path / "run", loss=greedy).run()


def test_a_damaged_best_checkpoint_and_a_damaged_line_are_said_on_resume(tmp_path: Path) -> None:
    run, values = tmp_path / "run", [1.0, 2.0, 3.0, 4.0]
    small_trainer(run, validate=script_validation(values), keep=1, steps=8).run()
    best = files.checkpoint_folder(run, 4) / files.WEIGHTS
    best.write_bytes(best.read_bytes()[:-1] + b"x")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8,\n')
    again = small_trainer(run, validate=script_validation(values[2:]), keep=1)
    again.run(resume=True)
    messages = " ".join(recorder(again).messages)
    assert "weights.safetensors was altered" in messages and "It was the best; step-8 takes its place" in messages
    assert "metrics.jsonl: line 5 is damaged" in messages


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(tmp_path: Path, number: signal.Signals) -> None:
    calls = []

    def interrupting(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        calls.append(1)
        if len(calls) == 11:
            os.kill(os.getpid(), number)
        return sum_loss(module, batch)

    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=rf"Stopped by {number.name} after step 6.*--resume") as caught:
        small_trainer(tmp_path / "run", loss=interrupting, accumulate=2).run()
    assert caught.value.exit_code == 128 + number and caught.value.step == 6
    assert signal.getsignal(number) is before
    assert len(calls) == 12 and files.checkpoint_steps(tmp_path / "run") == [0, 4, 6]
    small_trainer(tmp_path / "run", accumulate=2).run(resume=True)
    small_trainer(tmp_path / "whole", accumulate=2).run()
    assert equal_states(weights(tmp_path / "run", 12), weights(tmp_path / "whole", 12))
    assert same_metrics(tmp_path / "run", tmp_path / "whole")


def test_a_signal_ends_a_validation_at_once_and_resuming_makes_up_for_it(tmp_path: Path) -> None:
    calls = []

    def interrupt(module: nn.Module) -> Validation:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("the validation went on")
        return validation(module)

    options: dict[str, Any] = {"ema": 0.9, "average": 3}
    with pytest.raises(Interrupted):
        small_trainer(tmp_path / "run", validate=interrupt, **options).run()
    small_trainer(tmp_path / "run", **options).run(resume=True)
    small_trainer(tmp_path / "whole", **options).run()
    for name in (files.WEIGHTS, files.AVERAGED_WEIGHTS):
        assert equal_states(weights(tmp_path / "run", 12, name), weights(tmp_path / "whole", 12, name))
    assert same_metrics(tmp_path / "run", tmp_path / "whole")
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[3].valid_loss is not None


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    def impatient(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the step went on")

    with pytest.raises(KeyboardInterrupt):
        small_trainer(tmp_path / "run", loss=impatient).run()
    assert files.find_newest_undamaged(tmp_path / "run")[0] is not None


def same_metrics(first: Path, second: Path) -> bool:
    """The same steps, losses, tokens and validations; times differ."""
    rows = [
        [
            (row.step, row.loss, row.tokens, row.learning_rate, row.valid_loss, row.valid_score)
            for row in read_metrics(path)
        ]
        for path in (first / "metrics.jsonl", second / "metrics.jsonl")
    ]
    return rows[0] == rows[1] and len(rows[0]) > 0


def test_torch_is_as_before_after_a_run(tmp_path: Path) -> None:
    inside = []

    def look(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        inside.append((torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()))
        return sum_loss(module, batch)

    threads = torch.get_num_threads()
    small_trainer(tmp_path / "run", steps=1, loss=look, threads=threads + 1).run()
    assert inside == [(True, threads + 1)]
    assert not torch.are_deterministic_algorithms_enabled() and torch.get_num_threads() == threads
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


def test_threads_and_other_choices_are_read_back_on_resuming(tmp_path: Path) -> None:
    inside = []

    def look(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
        inside.append(torch.get_num_threads())
        return sum_loss(module, batch)

    threads = torch.get_num_threads()
    choices = {"choices": {"compile": False}}
    small_trainer(tmp_path / "run", steps=1, threads=threads + 1, **choices).run()
    assert files.read_choices(tmp_path / "run") == {"compile": False, "precision": "fp32", "threads": threads + 1}
    again = small_trainer(tmp_path / "run", steps=2, loss=look, **choices)
    again.run(resume=True)
    assert inside == [threads + 1] and len(recorder(again).messages) == 1  # how it ended
    other = small_trainer(tmp_path / "run", steps=3, threads=threads, choices={"compile": True})
    other.run(resume=True)
    warning, _ = recorder(other).messages
    assert f"threads {threads + 1} -> {threads}" in warning
    assert "Results may differ" in warning


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path) -> None:
    run = tmp_path / "run"
    small_trainer(run).run()
    (files.checkpoint_folder(run, 12) / files.OPTIMIZER).write_bytes(b"")
    trainer = small_trainer(run)
    trainer.run(resume=True)
    assert "step-12 is damaged: optimizer.safetensors is cut off" in recorder(trainer).messages[0]
    assert "step-8" in recorder(trainer).messages[0]
    assert recorder(trainer).plans[0].first_step == 8
    small_trainer(tmp_path / "whole").run()
    assert equal_states(weights(run, 12), weights(tmp_path / "whole", 12))
    assert same_metrics(run, tmp_path / "whole")


def test_nothing_sound_to_resume_from_is_said(tmp_path: Path) -> None:
    run = tmp_path / "run"
    small_trainer(run, keep=1, steps=4).run()
    (files.checkpoint_folder(run, 4) / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"no undamaged checkpoint to resume from.*step-4 is damaged"):
        small_trainer(run).run(resume=True)


def test_another_module_cannot_take_the_checkpoint(tmp_path: Path) -> None:
    small_trainer(tmp_path / "run", steps=2).run()
    other = small_trainer(tmp_path / "run")
    other.module = nn.Linear(3, 5)
    with pytest.raises(InputError, match="written by a different model or optimizer"):
        other.run(resume=True)


def test_an_open_run_directory_is_used_and_left_open(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path / "run", steps=2)
    with open_run(tmp_path / "run", configuration="a = 1\n") as directory:
        trainer.directory = directory
        trainer.run()
        with pytest.raises(InputError, match="in use"):
            small_trainer(tmp_path / "run").run(resume=True)


def test_extra_saves_change_nothing_and_are_resumed_from(tmp_path: Path) -> None:
    run = tmp_path / "run"
    small_trainer(run, steps=11, validate_every=100, save_every=5, keep=9).run()
    assert files.checkpoint_steps(run) == [0, 5, 10, 11]
    assert find_weights(ModelReference(run)).parent.name == "step-11"


def test_averaged_parts_of_a_lost_future_are_dropped(tmp_path: Path) -> None:
    """Going back to an older checkpoint takes the recent weights back as well."""
    run, options = tmp_path / "run", {"average": 3, "keep": 2, "validate_every": 3}
    small_trainer(run, **options).run()
    (files.checkpoint_folder(run, 12) / files.WEIGHTS).write_bytes(b"")
    again = small_trainer(run, **options)
    again.run(resume=True)
    assert recorder(again).plans[0].first_step == 9
    small_trainer(tmp_path / "whole", **options).run()
    averaged = [
        files.load_tensors(path / "checkpoints/averaged/weights.safetensors") for path in (run, tmp_path / "whole")
    ]
    assert equal_states(*averaged)


class Decaying(Falling):
    """A learning rate that is halved by every validation that is not better than the last one."""

    def __call__(self, step: int) -> float:
        rises = sum(later >= earlier for earlier, later in pairwise(self.observed))
        return super().__call__(step) * 0.5**rises


@pytest.mark.parametrize("end", [{"steps": 14}, {"seconds": 1e-9}])
@pytest.mark.parametrize("keep", [1, 3])
def test_the_validation_at_an_end_changes_nothing_for_a_run_that_goes_on(
    tmp_path: Path, end: dict[str, Any], keep: int
) -> None:
    """Neither patience nor learning rate nor the best checkpoint, nor any bit of the weights."""
    # The run that is parted has its best loss in the validation that only its end made due.
    losses = {4: 3.0, 8: 3.1, 12: 2.5, 16: 2.9, 20: 2.6, 24: 2.7} | dict.fromkeys((1, 14, 15), 0.1)
    options: dict[str, Any] = {"keep": keep, "average": 2, "early_stop": EarlyStop(metric="loss", patience=3)}

    def trainer(run: Path, **changes: Any) -> Trainer[Tokens]:
        small = small_trainer(run, **{"steps": 26, **options, **changes})
        small.schedule = Decaying()

        def validate(module: nn.Module) -> Validation:
            reports = recorder(small)
            step = reports.steps[-1].step if reports.steps else reports.plans[-1].first_step
            return Validation(losses[step], score=1.0)

        small.validate = validate
        return small

    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert trainer(whole).run().reason == "early stopping: 3 validations in a row without a better loss"
    first = trainer(parted, **end).run()
    assert first.step in (1, 14) and first.best == f"step-{first.step}" and first.best_value == 0.1
    assert trainer(parted, **end).run(resume=True).best == first.best, "it stays ended"
    again = trainer(parted)
    result = again.run(resume=True)
    assert result.step == 24 and result.best == "step-12"
    ends = [files.load_checkpoint(files.checkpoint_folder(run, 24)) for run in (whole, parted)]
    assert equal_states(dict(ends[0].weights), dict(ends[1].weights))
    assert ends[0].state["schedule"] == ends[1].state["schedule"]
    assert files.checkpoint_steps(whole) == files.checkpoint_steps(parted)
    assert (whole / "best").read_text() == (parted / "best").read_text() == "step-12\n"
    assert same_metrics(whole, parted)
