"""Training progress on the console: lines in a log, or a live panel on a terminal or in a notebook."""

from __future__ import annotations

import math
import time

from rich.console import Console

from clearhead.spec.describe import number_of
from clearhead.training.progress.reports import (
    Pace,
    Progress,
    RunPlan,
    StepReport,
    ValidationReport,
    duration,
    step_of,
)


class LineProgress(Progress):
    """Plain lines for logs: one every few seconds, and one per validation.

    Args:
        console: where to write.
        every_seconds: minimum time between two lines about steps.
    """

    def __init__(self, console: Console, *, every_seconds: float = 10.0) -> None:
        self.console = console
        self.every_seconds = every_seconds
        self._pace: Pace | None = None
        self._last_line = -math.inf

    def begin(self, plan: RunPlan) -> None:
        """Write the plan."""
        self._pace = Pace(plan)
        self.message(f"training {plan.run}: {describe_plan(plan)}")

    def step(self, report: StepReport) -> None:
        """Write a line if `every_seconds` have passed since the last one."""
        assert self._pace is not None, "begin comes before step"
        self._pace.add(report)
        now = time.monotonic()
        if now - self._last_line < self.every_seconds:
            return
        self._last_line = now
        left = self._pace.seconds_left
        self.message(
            f"step {step_of(report.step, self._pace.plan.steps)}  loss {report.loss:.4f}"
            f"  learning rate {report.learning_rate:.2e}  {self._pace.tokens_per_second:,.0f} tokens/s"
            + (f"  {duration(left)} left" if left is not None else "")
        )

    def validating(self, step: int) -> None:
        """Write that a validation begins."""
        self.message(f"step {step}  validating")

    def validated(self, report: ValidationReport) -> None:
        """Write the result of a validation."""
        assert self._pace is not None, "begin comes before validated"
        self._pace.validated(report)
        name = self._pace.plan.score_name or "score"
        score = f"  {name} {report.score:.2f}" if report.score is not None else ""
        best = "  (best so far)" if report.is_best else ""
        self.message(
            f"step {report.step}  validation loss {report.loss:.4f}{score}{best}  in {duration(report.seconds)}"
        )

    def message(self, text: str) -> None:
        """Write the message."""
        self.console.file.write(text + "\n")
        self.console.file.flush()


def progress_for(console: Console | None = None) -> Progress:
    """Return a live panel for a terminal or a notebook, and plain lines for anything else.

    Args:
        console: where to show progress; None: standard error.
    """
    from clearhead.training.progress.live_panel import LiveProgress

    console = console or Console(stderr=True)
    is_live = console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)
    return LiveProgress(console) if is_live else LineProgress(console)


def describe_plan(plan: RunPlan) -> str:
    """Return the plan of a run as text."""
    parts = [f"{plan.parameters:,} parameters"]
    if plan.steps is not None:
        parts.append(number_of(plan.steps, "step"))
    if plan.seconds is not None:
        parts.append(f"at most {duration(plan.seconds)}")
    if plan.first_step:
        parts.append(f"continuing after step {plan.first_step:,}")
    return ", ".join(parts)
