"""Training progress on the console: lines for a log, or a live panel on a terminal or in a notebook."""

from __future__ import annotations

import importlib
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from clearhead.base.progress import QUIET_SECONDS
from clearhead.spec.describe import count_noun
from clearhead.training.progress.reports import (
    Pace,
    RunPlan,
    StepReport,
    TrainingProgress,
    ValidationReport,
    duration,
    step_of,
)


class LineProgress(TrainingProgress):
    """Progress as plain lines for logs: a line every few seconds, and a line per validation.

    Args:
        console: the console to write to.
        every_seconds: the minimum time between two lines about steps, in seconds.
    """

    def __init__(self, console: Console, *, every_seconds: float = 10.0) -> None:
        self.console = console
        self.every_seconds = every_seconds
        self._pace: Pace | None = None
        self._last_line = -math.inf

    def begin(self, plan: RunPlan) -> None:
        """Write the plan of the run."""
        self._pace = Pace(plan)
        self.message(f"training {plan.run}: {describe_plan(plan)}")

    def step(self, report: StepReport) -> None:
        """Write a line about the step if `every_seconds` have passed since the last line."""
        assert self._pace is not None, "call begin before step"
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

    def begin_validation(self, step: int) -> None:
        """Write a line that a validation begins."""
        self.message(f"step {step}  validating")

    def end_validation(self, report: ValidationReport) -> None:
        """Write a line with the result of a validation."""
        assert self._pace is not None, "call begin before end_validation"
        self._pace.add_validation(report)
        name = self._pace.plan.score_name or "score"
        score = f"  {name} {report.score:.2f}" if report.score is not None else ""
        best = "  (best so far)" if report.is_best else ""
        self.message(
            f"step {report.step}  validation loss {report.loss:.4f}{score}{best}  in {duration(report.seconds)}"
        )

    def message(self, text: str) -> None:
        """Write a message as a line."""
        self.console.file.write(text + "\n")
        self.console.file.flush()


def progress_for(console: Console | None = None) -> TrainingProgress:
    """Return the progress display for a console: a live panel on a terminal or in a notebook, else plain lines.

    Args:
        console: the console that shows progress. None means standard error.
    """
    console = console or Console(stderr=True)
    is_live = console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)
    return LiveProgress(console) if is_live else LineProgress(console)


def describe_plan(plan: RunPlan) -> str:
    """Return the plan of a run as text."""
    parts = [f"{plan.parameters:,} parameters"]
    if plan.steps is not None:
        parts.append(count_noun(plan.steps, "step"))
    if plan.seconds is not None:
        parts.append(f"at most {duration(plan.seconds)}")
    if plan.first_step:
        parts.append(f"continuing after step {plan.first_step:,}")
    return ", ".join(parts)


_BLOCKS: Final = "▁▂▃▄▅▆▇█"


class LiveProgress(TrainingProgress):
    """Progress in a live panel.

    Args:
        console: a rich console on a terminal or in a notebook.
        every_seconds: the minimum time between two updates, in seconds.
    """

    def __init__(self, console: Console, *, every_seconds: float = 0.25) -> None:
        self.console = console
        self.every_seconds = every_seconds
        self._panel: TrainingPanel | None = None
        self._live: Live | NotebookLive | None = None
        self._last_drawn = -math.inf
        self._last_report = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def begin(self, plan: RunPlan) -> None:
        """Open the panel."""
        self._panel = TrainingPanel(plan)
        # The training thread draws; a second thread, which would slow down short steps, draws only during long ones.
        self._live = (
            NotebookLive(self._panel.render())
            if self.console.is_jupyter
            else Live(self._panel.render(), console=self.console, auto_refresh=False, transient=False)
        )
        self._live.start()
        self._last_report = time.monotonic()
        if not self.console.is_jupyter:
            self._ended.clear()
            threading.Thread(target=self._watch, daemon=True).start()

    def step(self, report: StepReport) -> None:
        """Add a step to the panel, and redraw it if `every_seconds` have passed."""
        assert self._panel is not None, "call begin before step"
        with self._lock:
            self._panel.step(report)
            self._draw()

    def begin_validation(self, step: int) -> None:
        """Show in the panel that a validation is running."""
        assert self._panel is not None, "call begin before begin_validation"
        with self._lock:
            self._panel.activity = "validating"
            self._draw(at_once=True)

    def end_validation(self, report: ValidationReport) -> None:
        """Show the result of a validation in the panel."""
        assert self._panel is not None, "call begin before end_validation"
        with self._lock:
            self._panel.add_validation(report)
            self._draw(at_once=True)

    def message(self, text: str) -> None:
        """Write a message above the panel."""
        self.console.print(Text(text))

    def end(self) -> None:
        """Stop the updates; the last panel stays on the screen."""
        self._ended.set()
        with self._lock:
            if self._live is not None and self._panel is not None:
                self._panel.activity = ""
                self._draw(at_once=True)
                self._live.stop()
                self._live = None

    def show_waiting(self) -> None:
        """Show the duration of the current step or validation once it is unusually long."""
        with self._lock:
            if self._panel is not None and self._panel.activity:
                self._panel.waited = time.monotonic() - self._last_report
                if self._panel.waited >= QUIET_SECONDS:
                    self._draw(at_once=True, is_report=False)

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            self.show_waiting()

    def _draw(self, *, at_once: bool = False, is_report: bool = True) -> None:
        now = time.monotonic()
        if is_report and self._panel is not None:
            self._last_report, self._panel.waited = now, 0.0
        if self._live is None or self._panel is None or (now - self._last_drawn < self.every_seconds and not at_once):
            return
        self._last_drawn = now
        self._live.update(self._panel.render(), refresh=True)


class NotebookLive:
    """A live display below a notebook cell, which shows the latest renderable; rich's own needs ipywidgets.

    Args:
        renderable: the first renderable to show.
    """

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable
        self._handle: Any = None

    def start(self) -> None:
        """Show the first renderable."""
        self._handle = importlib.import_module("IPython.display").display(self._renderable, display_id=True)

    def update(self, renderable: RenderableType, *, refresh: bool) -> None:
        """Replace the shown renderable."""
        assert refresh, "a notebook shows every update at once: pass refresh=True"
        self._handle.update(renderable)

    def stop(self) -> None:
        """Stop; the last renderable stays visible."""


class TrainingPanel:
    """The panel of a run, rendered by rich.

    Args:
        plan: the plan of the run.

    Attributes:
        activity: the current activity, "training" or "validating"; empty after the run.
        waited: the time since the last report in seconds.
    """

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.activity: str = "training"
        self.waited: float = 0.0
        self._pace = Pace(plan)
        self._recent: deque[float] = deque(maxlen=50)
        self._history = LossHistory()
        self._validations: deque[ValidationReport] = deque(maxlen=3)
        self._best: ValidationReport | None = None
        self._last: StepReport | None = None

    def step(self, report: StepReport) -> None:
        """Add the report of one step."""
        self._pace.add(report)
        self._recent.append(report.loss)
        self._history.add(report.loss)
        self._last = report
        self.activity = "training"

    def add_validation(self, report: ValidationReport) -> None:
        """Add the report of one validation."""
        self._pace.add_validation(report)
        self._validations.append(report)
        self._best = report if report.is_best else self._best
        self.activity = "training"

    def render(self) -> RenderableType:
        """Return the panel as a renderable."""
        body = Group(self._bar(), Text(), self._numbers(), *self._validation_lines())
        activity = f"{self.activity}, {self.waited:.0f} s" if self.waited >= QUIET_SECONDS else self.activity
        subtitle = f"[dim]{activity}[/dim]" if activity else None
        return Panel(body, title=f"[bold]{Text(self.plan.run).markup}[/bold]", title_align="left", subtitle=subtitle,
                     subtitle_align="right", border_style="cyan", padding=(0, 1), width=78)  # fmt: skip

    def _bar(self) -> RenderableType:
        last, left = self._last, self._pace.seconds_left
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        step = last.step if last else self.plan.first_step
        fraction = self._pace.fraction
        bar = ProgressBar(total=1.0, completed=fraction or 0.0, pulse=fraction is None and last is not None)
        elapsed = last.seconds if last else self.plan.seconds_before
        tail = f"{duration(left)} left" if left is not None else f"{duration(elapsed)} so far"
        grid.add_row(Text(f"step {step_of(step, self.plan.steps)}", style="bold"), bar, Text(tail, style="cyan"))
        return grid

    def _numbers(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(justify="right", no_wrap=True, min_width=9)
        grid.add_column(no_wrap=True)
        if self._last is None:
            grid.add_row("the first step is running", "", "")
            return grid
        mean = sum(self._recent) / len(self._recent)
        speed = f"{self._pace.tokens_per_second:,.0f}"
        grid.add_row("loss", f"{mean:.4f}", self._curve())
        grid.add_row("learning rate", f"{self._last.learning_rate:.2e}", "")
        grid.add_row("tokens/s", speed, Text(f"{duration(self._last.seconds)} so far", style="dim"))
        return grid

    def _curve(self) -> Text:
        """Return the losses as a line of blocks, with the losses of its lowest and highest block."""
        line, low, high = sparkline(self._history.logarithms, 32)
        return Text.assemble((line, "green"), (f" {math.exp(low):.2f} to {math.exp(high):.2f}", "dim"))

    def _validation_lines(self) -> list[RenderableType]:
        if not self._validations:
            return []
        grid = Table.grid(padding=(0, 2))
        for _ in range(4):
            grid.add_column(no_wrap=True)
        name = self.plan.score_name or "score"
        shown = list(self._validations)
        if self._best is not None and self._best not in shown:
            shown = [self._best, *shown[1:]]
        for report in shown:
            score = f"{name} {report.score:.2f}" if report.score is not None else ""
            is_best = report is self._best
            mark = Text("★ best", style="yellow") if is_best else Text("")
            grid.add_row(Text(f"validation {report.step:,}", style="dim"), f"loss {report.loss:.4f}", score, mark)
        return [Text(), grid]


class LossHistory:
    """The losses of a run in bounded memory: means over groups of steps, whose size grows with the run.

    Attributes:
        logarithms: the logarithms of the means, oldest first; a log scale shows small improvements late in a run.
    """

    def __init__(self) -> None:
        self.logarithms: list[float] = []
        self._stride = 1
        self._pending: list[float] = []

    def add(self, loss: float) -> None:
        """Add the loss of one step."""
        self._pending.append(loss)
        if len(self._pending) < self._stride:
            return
        self.logarithms.append(math.log(max(1e-9, sum(self._pending) / self._stride)))
        self._pending = []
        if len(self.logarithms) == 400:
            pairs = zip(self.logarithms[::2], self.logarithms[1::2], strict=True)
            self.logarithms = [(first + second) / 2 for first, second in pairs]
            self._stride *= 2


def sparkline(values: Sequence[float], width: int) -> tuple[str, float, float]:
    """Return numbers as one line of block characters, with the lowest and the highest number on its scale.

    Neighbours are averaged to fit the width. The scale ignores the first fifth of the numbers: the first losses of a
    run are so high that later ones would all look alike.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "", 0.0, 0.0
    width = min(width, len(finite))
    edges = [round(index * len(finite) / width) for index in range(width + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means[len(means) // 5 :])
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, int((mean - low) / span * 8))] for mean in means), low, high
