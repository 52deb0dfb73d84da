"""What a person sees of a training run: lines in a log, curves in TensorBoard, or the panel of `progress_live`."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast, runtime_checkable

from rich.console import Console

from clearhead.errors import InputError


@dataclass(frozen=True)
class Plan:
    """What a run is about to do.

    Attributes:
        run: name of the run, for the title.
        first_step: steps taken already, by an earlier part of the same run.
        steps: steps at which the run ends, or None where only time or patience ends it.
        seconds: wall-clock seconds after which it ends, or None.
        seconds_before: seconds that earlier parts of the run took.
        parameters: trained numbers in the module.
        score_name: what the validation score is called, or None where there is no score.
    """

    run: str
    first_step: int
    steps: int | None
    seconds: float | None
    seconds_before: float
    parameters: int
    score_name: str | None = None


@dataclass(frozen=True)
class StepReport:
    """One optimizer step.

    Attributes:
        step: optimizer steps taken.
        loss: mean training loss per label of this step, in nats.
        learning_rate: the schedule's learning rate of this step.
        tokens: source and target tokens of this step.
        step_seconds: time this step took.
        seconds: wall-clock time of the run so far.
    """

    step: int
    loss: float
    learning_rate: float
    tokens: int
    step_seconds: float
    seconds: float


@dataclass(frozen=True)
class ValidationReport:
    """One validation.

    Attributes:
        step: optimizer steps taken.
        loss: mean validation loss per label, in nats.
        score: the validation score, or None where there is none.
        is_best: whether this is the best validation so far.
        seconds: time the validation took.
    """

    step: int
    loss: float
    score: float | None
    is_best: bool
    seconds: float


@runtime_checkable
class TextStream(Protocol):
    """Where lines of text can be written: a file, a terminal, a buffer."""

    def write(self, text: str, /) -> int:
        """Write some text."""

    def flush(self) -> None:
        """Hand on what was written."""


@runtime_checkable
class Progress(Protocol):
    """Where a trainer tells what happens; it never writes anywhere itself."""

    def begin(self, plan: Plan) -> None:
        """Training is about to start."""

    def step(self, report: StepReport) -> None:
        """One optimizer step was taken."""

    def validating(self, step: int) -> None:
        """A validation begins."""

    def validated(self, report: ValidationReport) -> None:
        """A validation is done."""

    def message(self, text: str) -> None:
        """Something a person should read, once."""

    def end(self) -> None:
        """Training is over, for whatever reason."""


class SilentProgress:
    """Shows nothing."""

    def begin(self, plan: Plan) -> None:
        """Show nothing."""

    def step(self, report: StepReport) -> None:
        """Show nothing."""

    def validating(self, step: int) -> None:
        """Show nothing."""

    def validated(self, report: ValidationReport) -> None:
        """Show nothing."""

    def message(self, text: str) -> None:
        """Show nothing."""

    def end(self) -> None:
        """Show nothing."""


class SeveralProgress:
    """Passes everything on to several sinks.

    Args:
        sinks: told in this order.
    """

    def __init__(self, sinks: Sequence[Progress]) -> None:
        self.sinks = tuple(sinks)

    def begin(self, plan: Plan) -> None:
        """Tell every sink."""
        for sink in self.sinks:
            sink.begin(plan)

    def step(self, report: StepReport) -> None:
        """Tell every sink."""
        for sink in self.sinks:
            sink.step(report)

    def validating(self, step: int) -> None:
        """Tell every sink."""
        for sink in self.sinks:
            sink.validating(step)

    def validated(self, report: ValidationReport) -> None:
        """Tell every sink."""
        for sink in self.sinks:
            sink.validated(report)

    def message(self, text: str) -> None:
        """Tell every sink."""
        for sink in self.sinks:
            sink.message(text)

    def end(self) -> None:
        """Tell every sink."""
        for sink in self.sinks:
            sink.end()


class Pace:
    """Recent speed and the time that is left, from the last steps.

    Args:
        plan: what the run is about to do.
        window: how many steps count as recent.
    """

    def __init__(self, plan: Plan, *, window: int = 50) -> None:
        self.plan = plan
        self._recent: deque[StepReport] = deque(maxlen=window)
        self._began = time.monotonic()

    def add(self, report: StepReport) -> None:
        """Take one step into account."""
        self._recent.append(report)

    @property
    def tokens_per_second(self) -> float:
        """Source and target tokens per second over the recent steps, training alone."""
        spent = sum(report.step_seconds for report in self._recent)
        return sum(report.tokens for report in self._recent) / spent if spent > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the run ends by its plan, validations and saves included; None where the plan does not say."""
        if not self._recent:
            return None
        last = self._recent[-1]
        ends = []
        taken = last.step - self.plan.first_step
        if self.plan.steps is not None and taken > 0:
            per_step = (last.seconds - self.plan.seconds_before) / taken
            ends.append(max(0, self.plan.steps - last.step) * per_step)
        if self.plan.seconds is not None:
            ends.append(max(0.0, self.plan.seconds - last.seconds))
        return min(ends) if ends else None

    @property
    def fraction(self) -> float | None:
        """How much of the plan is done, from 0 to 1; None where the plan does not say."""
        if not self._recent:
            return None
        last, plan = self._recent[-1], self.plan
        parts = [last.step / plan.steps if plan.steps else 0.0, last.seconds / plan.seconds if plan.seconds else 0.0]
        return min(1.0, max(parts)) if plan.steps or plan.seconds else None


class LineProgress:
    """Plain lines for logs: one every so many seconds, and one per validation.

    Args:
        stream: where the lines go.
        every_seconds: least time between two lines about steps.
    """

    def __init__(self, stream: TextStream, *, every_seconds: float = 10.0) -> None:
        self.stream = stream
        self.every_seconds = every_seconds
        self._pace: Pace | None = None
        self._last_line = -math.inf

    def begin(self, plan: Plan) -> None:
        """Say what is about to run."""
        self._pace = Pace(plan)
        self._write(f"training {plan.run}: {describe_plan(plan)}")

    def step(self, report: StepReport) -> None:
        """Write a line if the last one is old enough."""
        assert self._pace is not None, "begin comes before step"
        self._pace.add(report)
        now = time.monotonic()
        if now - self._last_line < self.every_seconds:
            return
        self._last_line = now
        left = self._pace.seconds_left
        self._write(
            f"step {step_of(report.step, self._pace.plan.steps)}  loss {report.loss:.4f}"
            f"  learning rate {report.learning_rate:.2e}  {self._pace.tokens_per_second:,.0f} tokens/s"
            + (f"  {duration(left)} left" if left is not None else "")
        )

    def validating(self, step: int) -> None:
        """Say nothing: the result follows."""

    def validated(self, report: ValidationReport) -> None:
        """Write the result of a validation."""
        assert self._pace is not None, "begin comes before validated"
        name = self._pace.plan.score_name or "score"
        score = f"  {name} {report.score:.2f}" if report.score is not None else ""
        best = "  (best so far)" if report.is_best else ""
        self._write(
            f"step {report.step}  validation loss {report.loss:.4f}{score}{best}  in {duration(report.seconds)}"
        )

    def message(self, text: str) -> None:
        """Write the message."""
        self._write(text)

    def end(self) -> None:
        """Write nothing: whoever started the run says how it ended."""

    def _write(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()


class TensorBoardProgress:
    """Writes the curves of a run for TensorBoard.

    Args:
        folder: where the event files go.

    Raises:
        InputError: the tensorboard package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError(
                "TensorBoard logging needs the tensorboard package: install it with "
                "pip install 'clearhead[tensorboard]', or switch the logging off."
            ) from None
        self._writer: Any = SummaryWriter(str(folder))

    def begin(self, plan: Plan) -> None:
        """Write nothing."""

    def step(self, report: StepReport) -> None:
        """Write the numbers of one step."""
        self._writer.add_scalar("loss/train", report.loss, report.step)
        self._writer.add_scalar("learning_rate", report.learning_rate, report.step)
        self._writer.add_scalar("tokens_per_second", report.tokens / max(report.step_seconds, 1e-9), report.step)

    def validating(self, step: int) -> None:
        """Write nothing."""

    def validated(self, report: ValidationReport) -> None:
        """Write the numbers of one validation."""
        self._writer.add_scalar("loss/valid", report.loss, report.step)
        if report.score is not None:
            self._writer.add_scalar("score/valid", report.score, report.step)

    def message(self, text: str) -> None:
        """Write nothing."""

    def end(self) -> None:
        """Write everything out and close the files."""
        self._writer.close()


def progress_for(stream: TextStream | None = None) -> Progress:
    """Return what fits a stream: a live panel on a terminal, plain lines elsewhere.

    Args:
        stream: where to show progress; standard error where None.
    """
    from clearhead.training.progress.live_panel import LiveProgress

    stream = stream if stream is not None else sys.stderr
    console = Console(file=cast(IO[str], stream))
    return LiveProgress(console) if console.is_terminal and not console.is_dumb_terminal else LineProgress(stream)


def describe_plan(plan: Plan) -> str:
    """Return what a run is about to do, in a few words."""
    parts = [f"{plan.parameters:,} parameters"]
    if plan.steps is not None:
        parts.append(f"{plan.steps:,} steps")
    if plan.seconds is not None:
        parts.append(f"at most {duration(plan.seconds)}")
    if plan.first_step:
        parts.append(f"continuing after step {plan.first_step:,}")
    return ", ".join(parts)


def step_of(step: int, steps: int | None) -> str:
    """Return "12/400", or "12" where the end is not known."""
    return f"{step:,}/{steps:,}" if steps is not None else f"{step:,}"


def duration(seconds: float) -> str:
    """Return a time as a person writes it: "0.4 s", "42 s", "3 min 05 s", "2 h 10 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
