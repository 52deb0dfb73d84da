"""Optimizer steps of a training run: learning rate, gradients of all batches, agreement of processes, and update."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import torch
from torch import Tensor, nn

from clearhead.base.errors import RunFailure, is_out_of_memory
from clearhead.base.host_copy import HostCopy
from clearhead.base.signals import StopSignals
from clearhead.data.batches.base import Batches, BatchT
from clearhead.training.memory import return_memory
from clearhead.training.optim.optimizers import (
    gradient_scale,
    scale_gradients,
    set_learning_rate,
    update_on_device,
    updates_on_device,
)
from clearhead.training.optim.schedules import Schedule
from clearhead.training.optim.weight_averages import ExponentialAverage
from clearhead.training.parallel.engines import AgreedStop, StepSums, TrainingEngine
from clearhead.training.parallel.processes import Processes
from clearhead.training.record import TrainSettings


@dataclass(frozen=True)
class StepResult:
    """Results of one step.

    Attributes:
        step: the number of the step, counted from 1.
        learning_rate: the learning rate of the step.
        sums: the loss, labels and tokens of the step, summed over all processes.
    """

    step: int
    learning_rate: float
    sums: StepSums


@dataclass
class TrainingSteps(Generic[BatchT]):
    """Takes the optimizer steps of a run.

    Args:
        module: the module that is trained.
        optimizer: the optimizer of its parameters.
        schedule: the schedule of the learning rate.
        batches: the endless training batches.
        settings: the settings of the run.
        processes: the processes that train together.
        engine: the engine that computes the loss and its gradients.
        signals: the stop signals of this process.
        seconds: a function that returns the run time in seconds.
        last_good: a function that returns the folder of the last checkpoint, for messages.

    Attributes:
        parameters: the trained parameters.
        device: the device of the parameters.
        ema: the exponential average of the weights. None means that the run has none.
        agreed: the stop conditions that all processes agreed on in the last step.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    batches: Batches[BatchT]
    settings: TrainSettings
    processes: Processes
    engine: TrainingEngine[BatchT]
    signals: StopSignals
    seconds: Callable[[], float]
    last_good: Callable[[], Path]

    def __post_init__(self) -> None:
        self.parameters: list[nn.Parameter] = [
            parameter for parameter in self.module.parameters() if parameter.requires_grad
        ]
        self.device: torch.device = self.parameters[0].device
        ema = self.settings.ema
        self.ema: ExponentialAverage | None = None if ema is None else ExponentialAverage(self.module, ema)
        self.agreed: AgreedStop = AgreedStop()
        self._reads_late = updates_on_device(self.optimizer, self.device)
        self._launched = deque[tuple[StepResult, HostCopy]]()  # with the losses and the norm of each step
        self._has_failed = torch.zeros((), dtype=torch.bool, device=self.device)

    def take(self, step: int) -> list[StepResult]:
        """Take one step, and return the results of the steps whose values the host knows now.

        On CUDA, a fused optimizer updates before the host knows loss and norm. A step that is not finite changes no
        weights and no moments, nor do the steps after it; `results` then raises the failure.

        Args:
            step: the number of the step, counted from 1.

        Raises:
            RunFailure: the loss or the gradient of a step is not finite, or memory runs out.
        """
        rate = self.set_learning_rate(step)
        losses, sums = self._accumulate_gradients(step)
        if not self._reads_late:
            sums.add_losses(losses.tolist())
            sums = self._agree(sums)
            self._check_loss(step, sums)
            self._check_norm(step, scale_gradients(self.parameters, self._factor(sums), max_norm=self.settings.clip))
            self._update(step)
            return [StepResult(step, rate, sums)]
        sums = self._agree(sums)
        norm, divisor = gradient_scale(self.parameters, self._factor(sums), max_norm=self.settings.clip)
        values = torch.cat([losses.double(), norm[None]])
        self._has_failed = self._has_failed | ~values.isfinite().all()
        self._update(step, divisor)
        self._launched.append((StepResult(step, rate, sums), HostCopy(values)))
        return self.results(waits=False)

    def results(self, *, waits: bool) -> list[StepResult]:
        """Return the results of launched steps that `take` has not returned, in their order.

        Args:
            waits: True waits for the device and returns the results of all steps; False leaves the newest step out.

        Raises:
            RunFailure: the loss or the gradient of a step is not finite.
        """
        results = list[StepResult]()
        # The newest step stays, so that the device always has work.
        while len(self._launched) > (0 if waits else 1):
            result, values = self._launched.popleft()
            *losses, norm = values.read().tolist()
            sums = StepSums()
            sums.add_losses(losses)
            joined = StepSums.of(self.processes.all_gather_rows(sums.row()))
            result.sums.loss, result.sums.not_finite = joined.loss, joined.not_finite
            self._check_loss(result.step, result.sums)
            self._check_norm(result.step, norm)
            results.append(result)
        return results

    def set_learning_rate(self, step: int) -> float:
        """Set the learning rate of a step in the optimizer, and return it."""
        learning_rate = self.schedule(step)
        set_learning_rate(self.optimizer, learning_rate)
        return learning_rate

    def _accumulate_gradients(self, step: int) -> tuple[Tensor, StepSums]:
        """Accumulate the gradients of the summed loss over the batches of one step.

        Returns:
            The loss of each batch, on the device, and the sums of the step without the losses.
        """
        accumulate, losses, sums = self.settings.accumulate, list[Tensor](), StepSums()
        self.optimizer.zero_grad(set_to_none=True)
        # Autocast forgets the weights that it has cast when the outermost context ends.
        with torch.autocast(self.device.type, enabled=False):
            for index in range(accumulate):
                batch = next(self.batches)
                try:
                    with self.precision():
                        loss, labels = self.engine.loss(batch, is_last=index == accumulate - 1)
                    losses.append(loss.detach())
                    sums.add(labels, batch.num_tokens)
                    loss.backward()
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    raise RunFailure(
                        f"Memory ran out at step {step}, on a batch of {batch.num_tokens} tokens: use smaller batches "
                        f"and accumulate more of them. The last good checkpoint is {self.last_good()}."
                    ) from error
        return torch.stack(losses), sums

    def _factor(self, sums: StepSums) -> float:
        """Return the factor that turns the gradient of the summed loss into the gradient of the mean loss."""
        return self.engine.divisor / max(1, sums.num_labels)

    def _update(self, step: int, divisor: Tensor | None = None) -> None:
        """Update the weights and their average; with a divisor, the fused optimizer divides the gradients by it."""
        if divisor is None:
            self.optimizer.step()
        else:
            update_on_device(self.optimizer, divisor=divisor, has_failed=self._has_failed)
        if self.ema is not None:
            self.ema.update(self.module)
        return_memory(step, self.device, self.settings.precision)

    def _agree(self, sums: StepSums) -> StepSums:
        """Return the sums of a step over all processes, and let the processes agree on stop signal and run time."""
        row = [*sums.row(), float(self.signals.received or 0), self.seconds()]
        rows = self.processes.all_gather_rows(row)
        self.agreed = AgreedStop.of(rows)
        return StepSums.of(rows)

    def _check_loss(self, step: int, sums: StepSums) -> None:
        if not math.isfinite(sums.loss):
            where = f" in batch {sums.not_finite} of {self.settings.accumulate}" if self.settings.accumulate > 1 else ""
            raise self.not_finite(f"loss became {sums.loss}", f"step {step}{where}")

    def _check_norm(self, step: int, norm: float) -> None:
        if not math.isfinite(norm):
            raise self.not_finite(f"norm of the gradient became {norm}", f"step {step}")

    def precision(self) -> torch.autocast:
        """Return a context manager in which matrix products have the precision of the run."""
        return torch.autocast(self.device.type, torch.bfloat16, self.settings.precision == "bf16")

    def not_finite(self, what: str, where: str) -> RunFailure:
        """Return the failure of a run at a value that is not finite.

        Args:
            what: the value, such as "loss became nan".
            where: the step, and the batch if the step has several.
        """
        return RunFailure(
            f"The {what} at {where}, so training stopped before the weights were updated; the last good checkpoint "
            f"is {self.last_good()}. A lower learning rate, a longer warmup or gradient clipping usually helps."
        )
