"""Reports of the training loop, and the base class of the displays that receive them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from clearhead.base.progress import Display


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run.

    Attributes:
        run: the name of the run, for the title.
        first_step: the number of steps taken before this run was resumed.
        steps: the last step. None means that only time or early stopping ends the run.
        seconds: the limit of wall-clock time in seconds. None means no limit.
        seconds_before: the wall-clock time before this run was resumed, in seconds.
        parameters: the number of trained parameters.
        score_name: the name of the validation score. None means that there is no score.
        validate_every: the number of steps between two validations; 0 means no validations.
        validation_seconds: the forecast time of one validation with its checkpoint, in seconds.
    """

    run: str
    first_step: int
    steps: int | None
    seconds: float | None
    seconds_before: float
    parameters: int
    score_name: str | None = None
    validate_every: int = 0
    validation_seconds: float = 0.0


@dataclass(frozen=True)
class StepReport:
    """The report of one optimizer step.

    Attributes:
        step: the number of optimizer steps taken.
        loss: the mean training loss per label of this step, in nats.
        learning_rate: the learning rate of this step.
        tokens: the number of source and target tokens of this step.
        step_seconds: the time since the step before in seconds, without validations and saves.
        seconds: the wall-clock time of the run so far, in seconds.
    """

    step: int
    loss: float
    learning_rate: float
    tokens: int
    step_seconds: float
    seconds: float


@dataclass(frozen=True)
class ValidationReport:
    """The report of one validation.

    Attributes:
        step: the number of optimizer steps taken.
        loss: the mean validation loss per label, in nats.
        score: the validation score. None means that there is no score.
        is_best: True if this is the best validation so far.
        seconds: the time of the validation in seconds.
    """

    step: int
    loss: float
    score: float | None
    is_best: bool
    seconds: float


class TrainingProgress(Display):
    """Base class of displays: it receives the reports of the training loop, and subclasses show them."""

    def begin(self, plan: RunPlan) -> None:
        """Handle the start of training."""

    def step(self, report: StepReport) -> None:
        """Handle the report of one optimizer step."""

    def begin_validation(self, step: int) -> None:
        """Handle the start of a validation."""

    def end_validation(self, report: ValidationReport) -> None:
        """Handle the report of a finished validation."""

    def end(self) -> None:
        """Handle the end of training, whatever its reason."""


class Pace:
    """The pace of a run: throughput of the recent steps, and remaining time.

    Args:
        plan: the plan of the run.
        window: the number of recent steps that count.
    """

    def __init__(self, plan: RunPlan, *, window: int = 50) -> None:
        self.plan = plan
        self._recent: deque[StepReport] = deque(maxlen=window)
        self._validations: deque[ValidationReport] = deque(maxlen=5)

    def add(self, report: StepReport) -> None:
        """Add the report of one step."""
        self._recent.append(report)

    def add_validation(self, report: ValidationReport) -> None:
        """Add the report of one validation."""
        self._validations.append(report)

    @property
    def tokens_per_second(self) -> float:
        """The number of source and target tokens per second over the recent steps, without validations."""
        spent = sum(report.step_seconds for report in self._recent)
        return sum(report.tokens for report in self._recent) / spent if spent > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """The remaining time of steps and validations in seconds; None if the length of the run is not known."""
        if not self._recent:
            return None
        last = self._recent[-1]
        ends = []
        if self.plan.steps is not None:
            per_step = sum(report.step_seconds for report in self._recent) / len(self._recent)
            ends.append(max(0, self.plan.steps - last.step) * per_step + self._validation_seconds_left(last.step))
        if self.plan.seconds is not None:
            ends.append(max(0.0, self.plan.seconds - last.seconds))
        return min(ends) if ends else None

    def _validation_seconds_left(self, step: int) -> float:
        """Return the time of the remaining validations in seconds, from the last measured ones or the forecast."""
        plan = self.plan
        if plan.steps is None or not plan.validate_every:
            return 0.0
        validated = [-(-report.step // plan.validate_every) for report in self._validations]
        done = max([(step - 1) // plan.validate_every, *validated])
        measured = [report.seconds for report in self._validations]
        each = sum(measured) / len(measured) if measured else plan.validation_seconds
        return each * max(0, -(-plan.steps // plan.validate_every) - done)

    @property
    def fraction(self) -> float | None:
        """The completed share of the run, from 0 to 1; None if the length of the run is not known."""
        if not self._recent:
            return None
        last, plan = self._recent[-1], self.plan
        parts = [last.step / plan.steps if plan.steps else 0.0, last.seconds / plan.seconds if plan.seconds else 0.0]
        return min(1.0, max(parts)) if plan.steps or plan.seconds else None


def step_of(step: int, steps: int | None) -> str:
    """Return a step and the last step as text, such as "12/400"; only "12" if the last step is not known."""
    return f"{step:,}/{steps:,}" if steps is not None else f"{step:,}"


def duration(seconds: float) -> str:
    """Return a duration as a text with its unit: "93 ms", "4.2 s", "42 s", "3 min 05 s", "2 h 10 min"."""
    if 0 < seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.00995 else f"{1000 * seconds:.1f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
