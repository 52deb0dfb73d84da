"""What a training loop reports, and the base class of everything that shows it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from clearhead.base.progress import Display


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run.

    Attributes:
        run: name of the run, for the title.
        first_step: steps taken before this run was resumed.
        steps: the last step; None if only time or early stopping ends the run.
        seconds: limit of wall-clock seconds, or None.
        seconds_before: seconds before this run was resumed.
        parameters: number of trained parameters.
        score_name: name of the validation score, or None if there is no score.
        validate_every: steps between two validations; 0: there are none.
        validation_seconds: forecast of one validation with its checkpoint.
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
    """One optimizer step.

    Attributes:
        step: optimizer steps taken.
        loss: mean training loss per label of this step, in nats.
        learning_rate: of this step.
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
        score: the validation score, or None.
        is_best: whether this is the best validation so far.
        seconds: time the validation took.
    """

    step: int
    loss: float
    score: float | None
    is_best: bool
    seconds: float


class TrainingProgress(Display):
    """The display of a training: receives the reports of its loop as well; subclasses override what they show."""

    def begin(self, plan: RunPlan) -> None:
        """Training is about to start."""

    def step(self, report: StepReport) -> None:
        """One optimizer step was taken."""

    def begin_validation(self, step: int) -> None:
        """A validation begins."""

    def end_validation(self, report: ValidationReport) -> None:
        """A validation is done."""

    def end(self) -> None:
        """Training is over, for whatever reason."""


class Pace:
    """Throughput of the recent steps and remaining time.

    Args:
        plan: of the run.
        window: number of recent steps.
    """

    def __init__(self, plan: RunPlan, *, window: int = 50) -> None:
        self.plan = plan
        self._recent: deque[StepReport] = deque(maxlen=window)
        self._validations: deque[ValidationReport] = deque(maxlen=5)

    def add(self, report: StepReport) -> None:
        """Add one step."""
        self._recent.append(report)

    def add_validation(self, report: ValidationReport) -> None:
        """Add one validation."""
        self._validations.append(report)

    @property
    def tokens_per_second(self) -> float:
        """Source and target tokens per second over the recent steps, without validations."""
        spent = sum(report.step_seconds for report in self._recent)
        return sum(report.tokens for report in self._recent) / spent if spent > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the run ends: of the steps and of the validations to come; None if its length is not known."""
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
        """Return the seconds of the validations to come, by those that were measured last or else by the forecast."""
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
        """The completed share of the run, from 0 to 1; None if its length is not known."""
        if not self._recent:
            return None
        last, plan = self._recent[-1], self.plan
        parts = [last.step / plan.steps if plan.steps else 0.0, last.seconds / plan.seconds if plan.seconds else 0.0]
        return min(1.0, max(parts)) if plan.steps or plan.seconds else None


def step_of(step: int, steps: int | None) -> str:
    """Return "12/400", or "12" if the number of steps is not known."""
    return f"{step:,}/{steps:,}" if steps is not None else f"{step:,}"


def duration(seconds: float) -> str:
    """Return a duration with its unit: "93 ms", "4.2 s", "42 s", "3 min 05 s", "2 h 10 min"."""
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
