"""Optimizer steps of a training run: learning rate, gradients of all batches, agreement of processes, and update."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic

import torch

from clearhead.base.errors import RunFailure, is_out_of_memory
from clearhead.base.signals import StopSignals
from clearhead.data.batches.base import BatchT
from clearhead.training.memory import return_memory
from clearhead.training.optim.optimizers import scale_gradients
from clearhead.training.optim.weight_averages import ExponentialAverage
from clearhead.training.parallel.engines import AgreedStop, StepSums, TrainingEngine

if TYPE_CHECKING:
    from clearhead.training.loop import Trainer


class TrainingSteps(Generic[BatchT]):
    """Takes the optimizer steps of a run.

    Args:
        trainer: the module, the optimizer, the schedule, the batches and the settings.
        engine: the engine that computes the loss and its gradients.
        signals: the stop signals of this process.
        seconds: a function that returns the run time in seconds.
        last_good: a function that returns the folder of the last checkpoint, for messages.

    Attributes:
        parameters: the trained parameters.
        ema: the exponential average of the weights. None means that the run has none.
        agreed: the stop conditions that all processes agreed on in the last step.
    """

    def __init__(
        self,
        trainer: Trainer[BatchT],
        engine: TrainingEngine[BatchT],
        signals: StopSignals,
        *,
        seconds: Callable[[], float],
        last_good: Callable[[], Path],
    ) -> None:
        self.trainer, self.settings, self.engine, self.signals = trainer, trainer.settings, engine, signals
        self.parameters = [parameter for parameter in trainer.module.parameters() if parameter.requires_grad]
        self.ema = ExponentialAverage(trainer.module, self.settings.ema) if self.settings.ema is not None else None
        self.agreed = AgreedStop()
        self._seconds, self._last_good = seconds, last_good

    def take(self, step: int) -> tuple[float, StepSums]:
        """Take one step, and return its learning rate and its sums.

        Args:
            step: the number of the step, counted from 1.

        Raises:
            RunFailure: the loss or the gradient is not finite, or memory runs out; the weights are unchanged.
        """
        learning_rate = self.set_learning_rate(step)
        sums = self._agree(self._accumulate_gradients(step))
        if not math.isfinite(sums.loss):
            where = f" in batch {sums.not_finite} of {self.settings.accumulate}" if self.settings.accumulate > 1 else ""
            raise self.not_finite(f"loss became {sums.loss}", f"step {step}{where}")
        scale = self.engine.divisor / max(1, sums.num_labels)
        norm = scale_gradients(self.parameters, scale, max_norm=self.settings.clip)
        if not math.isfinite(norm):
            raise self.not_finite(f"norm of the gradient became {norm}", f"step {step}")
        self.trainer.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.trainer.module)
        return_memory(step, self.parameters[0].device, self.settings.precision)
        return learning_rate, sums

    def set_learning_rate(self, step: int) -> float:
        """Set the learning rate of a step in the optimizer, and return it."""
        learning_rate = self.trainer.schedule(step)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = learning_rate
        return learning_rate

    def _accumulate_gradients(self, step: int) -> StepSums:
        """Accumulate the gradients of the summed loss over the batches of one step, and return the sums of the step."""
        accumulate = self.settings.accumulate
        self.trainer.optimizer.zero_grad(set_to_none=True)
        sums = StepSums()
        for index in range(accumulate):
            batch = next(self.trainer.batches)
            try:
                with self.precision():
                    loss, labels = self.engine.loss(batch, is_last=index == accumulate - 1)
                sums.add(float(loss.detach()), labels, batch.num_tokens, index + 1)
                loss.backward()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise RunFailure(
                    f"Memory ran out at step {step}, on a batch of {batch.num_tokens} tokens: use smaller batches and "
                    f"accumulate more of them. The last good checkpoint is {self._last_good()}."
                ) from error
        return sums

    def _agree(self, sums: StepSums) -> StepSums:
        """Return the sums of a step over all processes, and let the processes agree on stop signal and run time."""
        row = [*sums.row(), float(self.signals.received or 0), self._seconds()]
        rows = self.trainer.processes.all_gather_rows(row)
        self.agreed = AgreedStop.of(rows)
        return StepSums.of(rows)

    def precision(self) -> torch.autocast:
        """Return a context manager in which matrix products have the precision of the run."""
        return torch.autocast(self.parameters[0].device.type, torch.bfloat16, self.settings.precision == "bf16")

    def not_finite(self, what: str, where: str) -> RunFailure:
        """Return the failure of a run at a value that is not finite.

        Args:
            what: the value, such as "loss became nan".
            where: the step, and the batch if the step has several.
        """
        return RunFailure(
            f"The {what} at {where}, so training stopped before the weights were updated; the last good checkpoint "
            f"is {self._last_good()}. A lower learning rate, a longer warmup or gradient clipping usually helps."
        )
