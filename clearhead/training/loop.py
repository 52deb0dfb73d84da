"""The training loop: steps, validations and checkpoints, with exact resumption.

A checkpoint holds everything that decides the next step: weights, their exponential average, and the states of
optimizer, schedule, data and random generators. It also holds the counters of `Tally`. The loop depends on nothing
else. A resumed run therefore takes the same steps as an uninterrupted one, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Generic, NoReturn

import torch
from torch import Tensor, nn

from clearhead.base.errors import RunFailure
from clearhead.base.printing import num_parameters
from clearhead.base.progress import message, use_display
from clearhead.base.signals import Interrupted, StopRequested, StopSignals
from clearhead.checkpoints.runs import checkpoint as files
from clearhead.checkpoints.runs.directory import RunDirectory, hold_lock
from clearhead.checkpoints.runs.extra_weights import is_snapshot_step, load_recent, read_average_record
from clearhead.checkpoints.runs.metrics import MetricsRow
from clearhead.data.batches.base import Batches, BatchT, Loss
from clearhead.generate.scoring.result import Validation
from clearhead.training.memory import freeze_objects
from clearhead.training.optim.optimizers import load_optimizer
from clearhead.training.optim.schedules import Schedule
from clearhead.training.optim.weight_averages import average_checkpoints, weights_in_place
from clearhead.training.parallel.engines import AgreedStop, TrainingEngine
from clearhead.training.parallel.processes import Processes
from clearhead.training.progress.reports import RunPlan, StepReport, TrainingProgress, ValidationReport, duration
from clearhead.training.random_state import (
    deterministic_algorithms,
    environment,
    environment_changes,
    preserve_random_state,
    preserve_threads,
    random_state,
    restore_random_state,
    seed_process,
)
from clearhead.training.record import FollowerRecord, RunRecord, RunResult, TrainSettings, num_snapshots, planned_steps
from clearhead.training.step import StepResult, TrainingSteps


@dataclass
class Trainer(Generic[BatchT]):
    """Trains a module of any task on endless batches.

    Attributes:
        module: the module that is trained, as returned by `training_tree`.
        optimizer: the optimizer of its parameters.
        schedule: the schedule of the learning rate.
        batches: the endless training batches.
        loss: a function that returns the summed loss of a batch (a scalar with gradient) and the number of its labels.
        validate: a function that validates the module; called in evaluation mode and without gradients.
        settings: the settings of the run.
        progress: the display that receives all reports.
        directory: the open run directory. None means that `run` opens `settings.run`.
        validation_seconds: the forecast time of one validation with its checkpoint, to show the remaining time.
        processes: the processes that train together; all run the same loop, and the first one writes and reports.
        engine: the engine that computes the loss and its gradients. None means that one process trains alone.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    batches: Batches[BatchT]
    loss: Loss[BatchT]
    validate: Callable[[nn.Module], Validation]
    settings: TrainSettings
    progress: TrainingProgress
    directory: RunDirectory | None = None
    validation_seconds: float = 0.0
    processes: Processes = field(default_factory=Processes)
    engine: TrainingEngine[BatchT] | None = None

    def run(self, *, resume: bool = False) -> RunResult:
        """Train until a limit of the settings is reached.

        Args:
            resume: True to continue from the newest undamaged checkpoint of the run directory.

        Raises:
            InputError: there is nothing to resume, or the run directory cannot be used.
            RunFailure: the loss or the gradient is not finite, memory runs out, or a checkpoint cannot be saved.
            Interrupted: training was stopped by a signal; everything is saved.
        """
        with contextlib.ExitStack() as stack:
            run = Path(self.settings.run)
            if self.processes.is_first:
                stack.enter_context(hold_lock(self.directory, run, resume=resume))
            stack.enter_context(use_display(self.progress))
            stack.enter_context(preserve_threads())
            stack.enter_context(deterministic_algorithms())
            signals = stack.enter_context(StopSignals(is_alone=self.processes.size == 1))
            training = _TrainingLoop(stack.enter_context(self._prepare_batches()), run, signals)
            training.resume() if resume else training.start()
            stack.callback(self.progress.end)
            stack.enter_context(freeze_objects(training.steps.device))
            return training.train()

    @contextlib.contextmanager
    def _prepare_batches(self) -> Iterator[Trainer[BatchT]]:
        """Return a context manager with a trainer whose batches a thread makes ahead, if it trains on CUDA."""
        device = next(self.module.parameters()).device
        if device.type != "cuda":
            yield self
            return
        from clearhead.data.feed import Prepared

        with contextlib.closing(Prepared(self.batches, device)) as batches:
            yield replace(self, batches=batches)


OTHER_RANDOM_STATES: Final = "random_of_others"
"""Key of the random states of all processes except the first, in the state of a checkpoint."""


class _TrainingLoop(Generic[BatchT]):
    """The steps, validations and checkpoints of one call of `Trainer.run`, with the state of the loop."""

    def __init__(self, trainer: Trainer[BatchT], run: Path, signals: StopSignals) -> None:
        self.trainer = trainer
        self.settings = trainer.settings
        self.run = run
        self.signals = signals
        self.processes = trainer.processes
        self.engine = trainer.engine or TrainingEngine(trainer.module, trainer.loss)
        self.tally = files.Tally()
        self.steps = TrainingSteps(trainer, self.engine, signals, seconds=self._seconds, last_good=self._last_good)
        self.end_step = planned_steps(self.settings, trainer.batches.batches_per_epoch)
        record = RunRecord if self.processes.is_first else FollowerRecord
        self.num_snapshots = count = num_snapshots(self.settings, trainer.module)
        self.record = record(run, self.settings, self.engine, num_snapshots=count)
        self.choices: dict[str, Any] = {}
        self.saved_step: int | None = None
        self.clock = self.lap_began = time.monotonic()

    # Starting

    def start(self) -> None:
        """Begin a new run with a checkpoint of step 0: from then on the run can be resumed."""
        if self.settings.threads is not None:
            torch.set_num_threads(self.settings.threads)
        self.choices = self._choices_here()
        self.record.begin()
        self.tally.validation_seconds = self.trainer.validation_seconds
        seed_process(self.settings.seed, self.processes.this.rank)
        self._save()

    def resume(self) -> None:
        """Restore the newest undamaged checkpoint."""
        folder = self.processes.broadcast(self.record.newest() if self.processes.is_first else self.run)
        saved = self.engine.load_checkpoint(folder)
        with files.convert_foreign_errors(folder):
            self._restore(saved)
        self.clock = time.monotonic() - self.tally.seconds
        self.steps.agreed = AgreedStop(seconds=self.tally.seconds)
        self.saved_step = self.tally.step
        self.record.go_back(self.tally)
        # Last, because the code above may draw random numbers.
        self._restore_random_state(saved.state)

    def _restore(self, saved: files.Checkpoint) -> None:
        """Restore model, optimizer, schedule, data position and counters in memory, before any file changes."""
        parts, state = self.trainer, saved.state
        torch.set_num_threads(self.settings.threads or state["choices"]["threads"])
        self.choices = self._choices_here()
        changes = environment_changes(state["environment"], self._environment())
        if changes is not None:
            message(changes)
        parts.module.load_state_dict(saved.weights)
        load_optimizer(parts.optimizer, saved.optimizer)
        if self.steps.ema is not None:
            assert saved.ema is not None, "the checkpoint has no weight average: the run was started without train.ema"
            self.steps.ema.load(saved.ema, state["ema_updates"])
        parts.schedule.load_state(state["schedule"])
        parts.batches.load_state(state["batches"])
        self.tally = files.Tally(**state["tally"])
        if self.tally.step:
            # A run that has ended takes no further step, but may save again.
            self.steps.set_learning_rate(self.tally.step)
        self._restore_random_state(state)

    def _restore_random_state(self, state: Mapping[str, Any]) -> None:
        """Restore the random generators of this process, or seed them if the checkpoint has fewer processes."""
        states = [state["random"], *state.get(OTHER_RANDOM_STATES, ())][self.processes.this.rank :][:1]
        if states:
            restore_random_state(states[0])
        else:
            seed_process(self.settings.seed, self.processes.this.rank, self.tally.step)

    def _environment(self) -> dict[str, str | int]:
        return environment(self.processes.size, is_sharded=self.engine.is_sharded)

    def _choices_here(self) -> dict[str, Any]:
        settings, threads = self.settings, torch.get_num_threads()
        here = {"compile": settings.compile, "precision": settings.precision, "threads": threads}
        return dict(settings.choices) | here

    # The loop

    def train(self) -> RunResult:
        """Train from the current step to the end of the run."""
        self._announce()
        self.trainer.module.train()
        self._warm_up()
        self._lap()
        while True:
            reason = self._reason_to_stop()
            if self._validation_is_due(reason is not None):
                self._validate()
                reason = self._reason_to_stop()
            elif self._line_is_due():
                self._write_line()
            if self._extra_save_is_due():
                self._save()
            if is_snapshot_step(self.tally.step, self.num_snapshots):
                self._keep_snapshot()
            if self._signal is not None:
                self._leave(self._signal)
            if reason is not None:
                return self._finish(reason)
            self._step()

    @property
    def _signal(self) -> signal.Signals | None:
        """The stop signal that all processes have agreed on, or None."""
        return self.signals.received if self.processes.size == 1 else self.steps.agreed.signal

    def _warm_up(self) -> None:
        """Let the engine make its first pass on the next batch, without any effect on the run."""
        with preserve_random_state(), self.steps.precision():
            before = self.trainer.batches.state()
            if self.processes.size > 1:
                self.engine.warm_up(next(self.trainer.batches))
            if self.settings.compile:
                from clearhead.training.compilation import compile_graphs  # imports PyTorch's compiler

                compile_graphs(self.trainer.module, self.engine, self.trainer.batches)
            self.trainer.batches.load_state(before)

    def _announce(self) -> None:
        plan = RunPlan(
            run=self.run.name,
            first_step=self.tally.step,
            steps=self.end_step,
            seconds=self.settings.seconds,
            seconds_before=self.tally.seconds,
            parameters=num_parameters(self.trainer.module, only_trained=True),
            score_name=self.settings.score_name,
            validate_every=self.settings.validate_every,
            validation_seconds=self.tally.validation_seconds,
        )
        self.trainer.progress.begin(plan)

    def _reason_to_stop(self) -> str | None:
        tally, early = self.tally, self.settings.early_stop
        if self.end_step is not None and tally.step >= self.end_step:
            return "the only step is done" if self.end_step == 1 else f"all {self.end_step:,} steps are done"
        seconds = self._seconds() if self.processes.size == 1 else self.steps.agreed.seconds
        if self.settings.seconds is not None and seconds >= self.settings.seconds and tally.step > 0:
            return f"the time limit of {duration(self.settings.seconds)} is reached"
        if early is not None and tally.misses >= early.patience:
            return f"early stopping: {early.patience} validations in a row without a better {early.metric}"
        return None

    def _validation_is_due(self, at_the_end: bool) -> bool:
        tally = self.tally
        is_new = tally.step > 0 and tally.validated_step != tally.step
        return is_new and self._signal is None and (at_the_end or tally.step % self.settings.validate_every == 0)

    def _line_is_due(self) -> bool:
        step, waits_for_validation = self.tally.step, self.tally.step % self.settings.validate_every == 0
        return step > self.tally.logged_step and step % self.settings.log_every == 0 and not waits_for_validation

    def _extra_save_is_due(self) -> bool:
        every = self.settings.save_every
        return every is not None and self.tally.step % every == 0 and self.saved_step != self.tally.step

    def _seconds(self) -> float:
        return time.monotonic() - self.clock

    # One step

    def _step(self) -> None:
        results = self.steps.take(self.tally.step + 1)
        self.tally.step += 1
        self._count(results)

    def _settle(self) -> None:
        """Wait for the results of all launched steps: what follows reads their numbers or saves their weights."""
        self._count(self.steps.results(waits=True))

    def _count(self, results: Sequence[StepResult]) -> None:
        """Count and report the steps whose results are known."""
        tally = self.tally
        for result in results:
            sums, spent = result.sums, self._lap()
            tally.tokens += sums.num_tokens
            tally.loss_sum += sums.loss
            tally.loss_count += sums.num_labels
            tally.window_tokens += sums.num_tokens
            tally.window_seconds += spent
            mean, seconds = sums.loss / max(1, sums.num_labels), self._seconds()
            self.trainer.progress.step(
                StepReport(result.step, mean, result.learning_rate, sums.num_tokens, spent, seconds)
            )

    def _lap(self) -> float:
        """Return the seconds since the last step, validation or save."""
        before, self.lap_began = self.lap_began, time.monotonic()
        return self.lap_began - before

    def _last_good(self) -> Path:
        assert self.saved_step is not None, "a run saves before its first step"
        return files.checkpoint_folder(self.run, self.saved_step)

    # Validation

    def _validate(self) -> None:
        self._settle()
        began, step = time.monotonic(), self.tally.step
        self.trainer.progress.begin_validation(step)
        try:
            validation = self._measure(self.steps.ema.weights if self.steps.ema is not None else None)
        except StopRequested:
            return
        if not math.isfinite(validation.loss):
            raise self.steps.not_finite(f"validation loss became {validation.loss}", f"step {step}")
        before = None
        if step % self.settings.validate_every:
            # Due only because the run ends here: a longer resumed run continues as if this validation had not run.
            before = copy.deepcopy((self.tally, self.trainer.schedule.state()))
        is_best = self._judge(validation)
        self._write_line(validation)
        self.trainer.schedule.observe(validation.loss)
        self.tally.validation_seconds = time.monotonic() - began
        self._save(before)
        report = ValidationReport(step, validation.loss, validation.score, is_best, time.monotonic() - began)
        self.trainer.progress.end_validation(report)
        self._lap()

    def _measure(self, weights: Mapping[str, Tensor] | None) -> Validation:
        """Validate the given weights, or those of the module; afterwards restore the random states and the module.

        Raises:
            StopRequested: a stop signal interrupted the validation. With sharded weights, no signal interrupts it.
        """
        module = self.trainer.module
        in_place = weights_in_place(module, weights) if weights is not None else contextlib.nullcontext()
        abandoning = contextlib.nullcontext() if self.engine.is_sharded else self.signals.abandoning()
        validation = None
        with preserve_random_state(), in_place, self.engine.whole_weights(), torch.no_grad():
            module.eval()
            try:
                with abandoning, self.steps.precision():
                    validation = self.trainer.validate(module)
            except StopRequested:
                pass
            finally:
                module.train()
        return self._agree_on(validation)

    def _agree_on(self, validation: Validation | None) -> Validation:
        """Return the validation of the first process; raise StopRequested if any process has not finished."""
        gathered = self.processes.all_gather((validation, int(self.signals.received or 0)))
        number = max(number for _, number in gathered)
        self.steps.agreed = AgreedStop(self.steps.agreed.seconds, signal.Signals(number) if number else None)
        validations = [validation for validation, _ in gathered if validation is not None]
        if len(validations) < len(gathered):
            raise StopRequested
        return validations[0]

    def _judge(self, validation: Validation) -> bool:
        """Record a validation for early stopping, best checkpoint and averaging; return whether it is the best yet."""
        tally, metric = self.tally, self.settings.metric
        value = validation.loss if metric == "loss" else validation.score
        if value is None:
            raise RunFailure("The best checkpoint is chosen by score, but validation returns no score: choose by loss.")
        best = tally.best_value
        is_best = best is None or (value < best if metric == "loss" else value > best)
        if is_best:
            tally.best_step, tally.best_value = tally.step, value
        tally.misses = 0 if is_best else tally.misses + 1
        tally.validated_step = tally.step
        if self.settings.average:
            tally.recent = [*tally.recent, tally.step][-self.settings.average :]
        return is_best

    # Files of the run

    def _write_line(self, validation: Validation | None = None) -> None:
        self._settle()
        tally = self.tally
        self.record.write_line(
            MetricsRow(
                step=tally.step,
                tokens=tally.tokens,
                seconds=round(self._seconds(), 3),
                loss=tally.loss_sum / max(1, tally.loss_count),
                learning_rate=self.trainer.schedule(tally.step),
                tokens_per_second=round(tally.window_tokens / max(1e-9, tally.window_seconds), 1),
                valid_loss=validation.loss if validation is not None else None,
                valid_score=validation.score if validation is not None else None,
            )
        )
        tally.logged_step = tally.step
        tally.loss_sum, tally.loss_count, tally.window_tokens, tally.window_seconds = 0.0, 0, 0, 0.0

    def _save(self, resumed: tuple[files.Tally, dict[str, Any]] | None = None) -> None:
        """Save a checkpoint.

        Args:
            resumed: the counters and the schedule state that a resumed run starts with. None means the current ones.
        """
        self._settle()
        tally = self.tally
        tally.seconds = self._seconds()
        saved, schedule = resumed or (tally, self.trainer.schedule.state())
        saved.seconds, saved.validation_seconds = tally.seconds, tally.validation_seconds
        first, *others = self.processes.all_gather(random_state())
        state: dict[str, Any] = {
            "tally": asdict(saved),
            "schedule": schedule,
            "batches": self.trainer.batches.state(),
            "random": first,
            OTHER_RANDOM_STATES: others,
            "choices": self.choices,
            "environment": self._environment(),
        }
        ema = None
        if self.steps.ema is not None:
            ema, state["ema_updates"] = self.steps.ema.weights, self.steps.ema.num_updates
        weights, optimizer = self.trainer.module.state_dict(), self.trainer.optimizer.state_dict()
        self.record.save(files.Checkpoint(tally.step, weights, optimizer, ema, state), tally)
        # A barrier: no process continues or stops before the checkpoint is on the disk.
        self.saved_step = self.processes.broadcast(tally.step)
        self._lap()

    def _keep_snapshot(self) -> None:
        self._settle()
        assert self.saved_step is not None, "a run saves before its first step"
        weights = self.steps.ema.weights if self.steps.ema is not None else self.trainer.module.state_dict()
        self.record.keep_snapshot(self.tally.step, weights, self.saved_step)
        # A barrier: no process continues before the snapshot is on the disk.
        self.processes.broadcast(self.tally.step)
        self._lap()

    def _leave(self, number: signal.Signals) -> NoReturn:
        if self.saved_step != self.tally.step:
            self._save()
        self.record.draw()
        raise Interrupted(number, self.run, self.tally.step)

    # The end

    def _finish(self, reason: str) -> RunResult:
        message(f"training ended after step {self.tally.step:,} and {duration(self._seconds())}: {reason}")
        averaged = self._average()
        self.record.draw()
        best = self.tally.best_step
        return RunResult(
            run=self.run,
            step=self.tally.step,
            best=f"step-{best}" if best is not None else None,
            best_value=self.tally.best_value,
            seconds=self._seconds(),
            reason=reason,
            best_by="validation loss" if self.settings.metric == "loss" else self.settings.score_name,
            averaged=averaged,
        )

    def _average(self) -> Validation | None:
        """Average the last validated weights, validate the average, save it and return its validation."""
        steps = self.tally.recent
        if len(steps) < 2:
            return None
        about = self.processes.broadcast(read_average_record(self.run))
        if about is not None and about.steps == steps and about.valid_loss is not None:
            return Validation(about.valid_loss, about.valid_score)
        # Only the first process reads the files; with sharded weights all processes do, from a shared folder.
        reads = self.processes.is_first or self.engine.is_sharded
        weights = average_checkpoints(load_recent(self.run, steps)) if reads else {}
        self.trainer.progress.begin_validation(self.tally.step)
        try:
            validation = self._measure(self.engine.place_weights(weights))
        except StopRequested:
            assert self._signal is not None, "only a stop signal interrupts a validation"
            self._leave(self._signal)
        self.record.save_averaged(weights, steps, validation)
        return validation
