"""The training loop: steps, validations and checkpoints, with exact resumption.

A checkpoint holds everything that decides the next step: weights, their exponential average, the states of optimizer,
schedule, data and random generators, and the counters of `Tally`. The loop depends on nothing else, so a resumed run
takes the same steps as an uninterrupted one, bit by bit.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, NoReturn

import torch
from torch import Tensor, nn

from clearhead.errors import InputError, RunFailure
from clearhead.evaluate.result import Validation
from clearhead.runs import checkpoint as files
from clearhead.runs.directory import AVERAGED, RunDirectory, held
from clearhead.runs.metrics import Metrics, MetricsLog
from clearhead.runs.recent_weights import (
    about_averaged,
    keep_recent,
    load_recent,
    prune_recent,
    restore_recent,
    save_averaged,
)
from clearhead.training.optim.gradients import scale_gradients
from clearhead.training.optim.optimizers import load_optimizer
from clearhead.training.optim.schedules import Schedule
from clearhead.training.optim.weight_averages import ExponentialAverage, average_checkpoints, weights_in_place
from clearhead.training.preflight import is_out_of_memory
from clearhead.training.progress.plots import Plotter, training_loss_note
from clearhead.training.progress.reports import Progress, RunPlan, StepReport, ValidationReport, duration
from clearhead.training.protocols import Batches, BatchT
from clearhead.training.random_state import (
    deterministic_algorithms,
    environment,
    environment_changes,
    preserved_random_state,
    random_state,
    restore_random_state,
    restored_threads,
    seed_everything,
)
from clearhead.training.settings import TrainResult, TrainSettings, planned_steps
from clearhead.training.signals import Interrupted, StopRequested, StopSignals


@dataclass
class Trainer(Generic[BatchT]):
    """Trains any module on any batches, whatever the task.

    Attributes:
        module: the module to train.
        optimizer: over its parameters.
        schedule: the learning rate of each step.
        batches: endless training batches.
        loss: returns the summed loss of a batch (a scalar with gradient) and the number of its labels.
        validate: called in evaluation mode and without gradients.
        settings: of the run.
        progress: receives the reports.
        directory: the run directory, if it is open already; None: `run` opens `settings.run`.
        validation_seconds: forecast of one validation with its checkpoint, for the time left.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    batches: Batches[BatchT]
    loss: Callable[[nn.Module, BatchT], tuple[Tensor, int]]
    validate: Callable[[nn.Module], Validation]
    settings: TrainSettings
    progress: Progress
    directory: RunDirectory | None = None
    validation_seconds: float = 0.0

    def run(self, *, resume: bool = False) -> TrainResult:
        """Train until a limit of the settings is reached.

        Args:
            resume: continue from the newest undamaged checkpoint of the run directory.

        Raises:
            InputError: there is nothing to resume, or the run directory cannot be used.
            RunFailure: the loss or the gradient is not finite, memory runs out, or a checkpoint cannot be saved.
            Interrupted: stopped by a signal; everything is saved.
        """
        with contextlib.ExitStack() as stack:
            run = stack.enter_context(held(self.directory, Path(self.settings.run), resume=resume))
            stack.enter_context(restored_threads())
            stack.enter_context(deterministic_algorithms())
            signals = stack.enter_context(StopSignals())
            training = _Training(self, run, signals)
            training.resume() if resume else training.start()
            stack.callback(self.progress.end)
            return training.train()


@contextlib.contextmanager
def _refused(folder: Path) -> Iterator[None]:
    """Turn what a checkpoint of something else, or an altered one, makes libraries raise into an `InputError`."""
    try:
        yield
    except (InputError, RunFailure):
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{folder} was written by a different model or optimizer, or was altered: {reason}") from error


class _Training(Generic[BatchT]):
    """The state of one call of `Trainer.run`."""

    def __init__(self, parts: Trainer[BatchT], run: Path, signals: StopSignals) -> None:
        self.parts = parts
        self.settings = parts.settings
        self.run = run
        self.signals = signals
        self.tally = files.Tally()
        self.parameters = [parameter for parameter in parts.module.parameters() if parameter.requires_grad]
        self.end_step = planned_steps(self.settings, parts.batches.batches_per_epoch)
        self.log = MetricsLog(run)
        note = training_loss_note(parts.module, self.settings.label_smoothing)
        self.plotter = Plotter(run / "plots", parts.progress.message, note=note) if self.settings.plots else None
        self.rows: list[Metrics] = []
        self.ema = ExponentialAverage(parts.module, self.settings.ema) if self.settings.ema is not None else None
        self.choices: dict[str, Any] = {}
        self.saved_step: int | None = None
        self.clock = time.monotonic()

    # Starting

    def start(self) -> None:
        """Begin a new run with a checkpoint of step 0, so that it can always be resumed."""
        if self.settings.threads is not None:
            torch.set_num_threads(self.settings.threads)
        self.choices = self._choices_here()
        files.clear_leftovers(self.run)
        self.log.cut_back(0)
        restore_recent(self.run, [])
        files.remove_folder(self.run / "checkpoints" / AVERAGED)
        self.tally.validation_seconds = self.parts.validation_seconds
        seed_everything(self.settings.seed)
        self._save()

    def resume(self) -> None:
        """Restore the newest undamaged checkpoint."""
        files.clear_leftovers(self.run)
        folder, skipped = files.newest_sound(self.run)
        if folder is None:
            raise InputError(f"{self.run} has no undamaged checkpoint to resume from. {' '.join(skipped)}".rstrip())
        for damage in skipped:
            self.parts.progress.message(f"{damage} It is skipped; the newest undamaged checkpoint is {folder.name}.")
        saved = files.load_checkpoint(folder)
        with _refused(folder):
            self._restore(saved)
        self.clock = time.monotonic() - self.tally.seconds
        self.saved_step = self.tally.step
        for number in self.log.damaged_lines():
            self.parts.progress.message(f"{self.log.path}: line {number} is damaged and is left out.")
        self.log.cut_back(self.tally.logged_step)
        self.rows = self.log.rows()
        for lost in restore_recent(self.run, self.tally.recent):
            self.parts.progress.message(lost)
        self._restore_best()
        self._prune()
        # Last: nothing above may draw random numbers after the generators are restored.
        restore_random_state(saved.state["random"])

    def _restore(self, saved: files.Checkpoint) -> None:
        """Restore all that is in memory, before a file of the run is changed."""
        parts, state = self.parts, saved.state
        torch.set_num_threads(self.settings.threads or state["choices"]["threads"])
        self.choices = self._choices_here()
        changes = environment_changes(state["environment"], environment())
        if changes is not None:
            parts.progress.message(changes)
        parts.module.load_state_dict(saved.weights)
        load_optimizer(parts.optimizer, saved.optimizer)
        if self.ema is not None:
            assert saved.ema is not None, "the run was started without an average"
            self.ema.load(saved.ema, state["ema_updates"])
        parts.schedule.load_state(state["schedule"])
        parts.batches.load_state(state["batches"])
        self.tally = files.Tally(**state["tally"])
        restore_random_state(state["random"])

    def _restore_best(self) -> None:
        """Make the file `best` agree with the checkpoint: a later best checkpoint may be damaged."""
        best = self.tally.best_step
        if best is None:
            (self.run / "best").unlink(missing_ok=True)
            return
        damage = files.weights_damage(files.checkpoint_folder(self.run, best))
        if damage is not None:
            self.parts.progress.message(f"{damage} It was the best; step-{self.tally.step} takes its place.")
            best = self.tally.step
        if files.read_best(self.run) != best:
            files.write_best(self.run, best)

    def _choices_here(self) -> dict[str, Any]:
        return dict(self.settings.choices) | {"precision": self.settings.precision, "threads": torch.get_num_threads()}

    # The loop

    def train(self) -> TrainResult:
        """Train from the present step to the end."""
        self._announce()
        self.parts.module.train()
        while True:
            reason = self._reason_to_stop()
            if self._validation_is_due(reason is not None):
                self._validate()
                reason = self._reason_to_stop()
            elif self._line_is_due():
                self._write_line()
            if self._extra_save_is_due():
                self._save()
            if self.signals.received is not None:
                self._leave(self.signals.received)
            if reason is not None:
                return self._finish(reason)
            self._step()

    def _announce(self) -> None:
        plan = RunPlan(
            run=self.run.name,
            first_step=self.tally.step,
            steps=self.end_step,
            seconds=self.settings.seconds,
            seconds_before=self.tally.seconds,
            parameters=sum(parameter.numel() for parameter in self.parameters),
            score_name=self.settings.score_name,
            validate_every=self.settings.validate_every,
            validation_seconds=self.tally.validation_seconds,
        )
        self.parts.progress.begin(plan)

    def _reason_to_stop(self) -> str | None:
        tally, early = self.tally, self.settings.early_stop
        if self.end_step is not None and tally.step >= self.end_step:
            return f"all {self.end_step:,} steps are done"
        if self.settings.seconds is not None and self._seconds() >= self.settings.seconds and tally.step > 0:
            return f"the time limit of {duration(self.settings.seconds)} is reached"
        if early is not None and tally.misses >= early.patience:
            return f"early stopping: {early.patience} validations in a row without a better {early.metric}"
        return None

    def _validation_is_due(self, at_the_end: bool) -> bool:
        tally = self.tally
        is_new = tally.step > 0 and tally.validated_step != tally.step
        return (
            is_new and self.signals.received is None and (at_the_end or tally.step % self.settings.validate_every == 0)
        )

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
        began = time.monotonic()
        step, parts = self.tally.step + 1, self.parts
        learning_rate = parts.schedule(step)
        for group in parts.optimizer.param_groups:
            group["lr"] = learning_rate
        loss_sum, num_labels, num_tokens = self._accumulate_gradients(step)
        norm = scale_gradients(self.parameters, 1.0 / max(1, num_labels), max_norm=self.settings.clip)
        if not math.isfinite(norm):
            raise self._not_finite(f"norm of the gradient became {norm}", f"step {step}")
        parts.optimizer.step()
        if self.ema is not None:
            self.ema.update(parts.module)
        spent = time.monotonic() - began
        tally = self.tally
        tally.step = step
        tally.tokens += num_tokens
        tally.loss_sum += loss_sum
        tally.loss_count += num_labels
        tally.window_tokens += num_tokens
        tally.window_seconds += spent
        parts.progress.step(
            StepReport(step, loss_sum / max(1, num_labels), learning_rate, num_tokens, spent, self._seconds())
        )

    def _accumulate_gradients(self, step: int) -> tuple[float, int, int]:
        """Accumulate the gradients of the summed loss over the batches of one step."""
        parts, accumulate = self.parts, self.settings.accumulate
        parts.optimizer.zero_grad(set_to_none=True)
        loss_sum, num_labels, num_tokens = 0.0, 0, 0
        for index in range(accumulate):
            batch = next(parts.batches)
            try:
                with self._precision():
                    loss, labels = parts.loss(parts.module, batch)
                value = float(loss.detach())
                if not math.isfinite(value):
                    place = f" in batch {index + 1} of {accumulate}" if accumulate > 1 else ""
                    raise self._not_finite(f"loss became {value}", f"step {step}{place}")
                loss.backward()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise RunFailure(
                    f"Memory ran out at step {step}, on a batch of {batch.num_tokens} tokens: use smaller batches and "
                    f"accumulate more of them. The last good checkpoint is {self._last_good()}."
                ) from error
            loss_sum += value
            num_labels += labels
            num_tokens += batch.num_tokens
        return loss_sum, num_labels, num_tokens

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if self.settings.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.parameters[0].device.type, dtype=torch.bfloat16)

    def _not_finite(self, what: str, where: str) -> RunFailure:
        return RunFailure(
            f"The {what} at {where}, so training stopped before the weights were updated; the last good checkpoint "
            f"is {self._last_good()}. A lower learning rate, a longer warmup or gradient clipping usually helps."
        )

    def _last_good(self) -> Path:
        assert self.saved_step is not None, "a run saves before its first step"
        return files.checkpoint_folder(self.run, self.saved_step)

    # Validation

    def _validate(self) -> None:
        began, step = time.monotonic(), self.tally.step
        self.parts.progress.validating(step)
        try:
            found = self._measure(self.ema.weights if self.ema is not None else None)
        except StopRequested:
            return
        if not math.isfinite(found.loss):
            raise self._not_finite(f"validation loss became {found.loss}", f"step {step}")
        is_best = self._judge(found)
        self._write_line(found)
        self.parts.schedule.observe(found.loss)
        self.tally.validation_seconds = time.monotonic() - began
        self._save()
        report = ValidationReport(step, found.loss, found.score, is_best, time.monotonic() - began)
        self.parts.progress.validated(report)

    def _measure(self, weights: Mapping[str, Tensor] | None) -> Validation:
        """Validate the given weights, or the module's own; random states and module are the same afterwards."""
        module = self.parts.module
        in_place = weights_in_place(module, weights) if weights is not None else contextlib.nullcontext()
        with preserved_random_state(), in_place, torch.no_grad():
            module.eval()
            try:
                with self.signals.abandoning(), self._precision():
                    return self.parts.validate(module)
            finally:
                module.train()

    def _judge(self, found: Validation) -> bool:
        """Update the counters, and return whether this validation is the best so far."""
        tally, metric = self.tally, self.settings.metric
        value = found.loss if metric == "loss" else found.score
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

    # What goes to the disk

    def _write_line(self, found: Validation | None = None) -> None:
        tally = self.tally
        if tally.logged_step == tally.step:
            # A signal came between this step's line and its validation: a step has one line.
            self.log.cut_back(tally.step - 1)
            row = self.rows.pop()
        else:
            row = Metrics(
                step=tally.step,
                tokens=tally.tokens,
                seconds=round(self._seconds(), 3),
                loss=tally.loss_sum / max(1, tally.loss_count),
                learning_rate=self.parts.schedule(tally.step),
                tokens_per_second=round(tally.window_tokens / max(1e-9, tally.window_seconds), 1),
            )
        if found is not None:
            row = replace(row, valid_loss=found.loss, valid_score=found.score)
        self.log.append(row)
        self.rows.append(row)
        tally.logged_step = tally.step
        tally.loss_sum, tally.loss_count, tally.window_tokens, tally.window_seconds = 0.0, 0, 0, 0.0
        if self.plotter is not None:
            self.plotter.draw_if_due(self.rows, score_name=self.settings.score_name)

    def _save(self) -> None:
        tally = self.tally
        tally.seconds = self._seconds()
        self.log.sync()
        state: dict[str, Any] = {
            "tally": asdict(tally),
            "schedule": self.parts.schedule.state(),
            "batches": self.parts.batches.state(),
            "random": random_state(),
            "choices": self.choices,
            "environment": environment(),
        }
        ema = None
        if self.ema is not None:
            ema, state["ema_updates"] = self.ema.weights, self.ema.num_updates
        weights, optimizer = self.parts.module.state_dict(), self.parts.optimizer.state_dict()
        files.save_checkpoint(self.run, files.Checkpoint(tally.step, weights, optimizer, ema, state))
        self.saved_step = tally.step
        if tally.best_step is not None and files.read_best(self.run) != tally.best_step:
            files.write_best(self.run, tally.best_step)
        if tally.recent and tally.recent[-1] == tally.step:
            keep_recent(self.run, tally.step)
        self._prune()

    def _prune(self) -> None:
        """Delete old checkpoints, and recent weights that no kept checkpoint needs."""
        settings, tally = self.settings, self.tally
        files.prune_checkpoints(self.run, newest=tally.step, keep=settings.keep, best=tally.best_step)
        prune_recent(self.run, keep=(settings.average or 0) + settings.keep)

    def _draw(self) -> None:
        if self.plotter is not None:
            self.plotter.draw(self.rows, score_name=self.settings.score_name)

    def _leave(self, number: signal.Signals) -> NoReturn:
        if self.saved_step != self.tally.step:
            self._save()
        self._draw()
        raise Interrupted(number, self.run, self.tally.step)

    # The end

    def _finish(self, reason: str) -> TrainResult:
        self.parts.progress.message(
            f"training ended after step {self.tally.step:,} and {duration(self._seconds())}: {reason}"
        )
        averaged = self._average()
        self._draw()
        best = self.tally.best_step
        return TrainResult(
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
        """Average the last validated weights, validate the average and save it."""
        steps = self.tally.recent
        if len(steps) < 2:
            return None
        about = about_averaged(self.run)
        if about is not None and about.steps == steps and about.valid_loss is not None:
            return Validation(about.valid_loss, about.valid_score)
        weights = average_checkpoints(load_recent(self.run, steps))
        self.parts.progress.validating(self.tally.step)
        try:
            found = self._measure(weights)
        except StopRequested:
            assert self.signals.received is not None, "only a signal interrupts a validation"
            self._leave(self.signals.received)
        save_averaged(self.run, weights, {"steps": steps, "valid_loss": found.loss, "valid_score": found.score})
        return found
