"""Training curves for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clearhead.errors import InputError
from clearhead.training.progress.reports import Progress, RunPlan, StepReport, ValidationReport


class TensorBoardProgress(Progress):
    """Writes the curves of a run for TensorBoard and passes every report on.

    Args:
        folder: where the event files go.
        shown: receives every report as well.

    Raises:
        InputError: the tensorboard package is not installed.
    """

    def __init__(self, folder: Path, shown: Progress) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError(
                "TensorBoard logging needs the tensorboard package: install it with "
                "pip install 'clearhead[tensorboard]', or set train.tensorboard = false."
            ) from None
        self._writer: Any = SummaryWriter(str(folder))
        self.shown = shown

    def begin(self, plan: RunPlan) -> None:
        """Pass the plan on."""
        self.shown.begin(plan)

    def step(self, report: StepReport) -> None:
        """Write the numbers of one step."""
        self.shown.step(report)
        self._writer.add_scalar("loss/train", report.loss, report.step)
        self._writer.add_scalar("learning_rate", report.learning_rate, report.step)
        self._writer.add_scalar("tokens_per_second", report.tokens / max(report.step_seconds, 1e-9), report.step)

    def validating(self, step: int) -> None:
        """Pass the step on."""
        self.shown.validating(step)

    def validated(self, report: ValidationReport) -> None:
        """Write the numbers of one validation."""
        self.shown.validated(report)
        self._writer.add_scalar("loss/valid", report.loss, report.step)
        if report.score is not None:
            self._writer.add_scalar("score/valid", report.score, report.step)

    def message(self, text: str) -> None:
        """Pass the message on."""
        self.shown.message(text)

    def end(self) -> None:
        """Write everything out and close the files."""
        self.shown.end()
        self._writer.close()
