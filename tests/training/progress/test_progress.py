"""What a person sees: a panel on a terminal, plain lines elsewhere, and never a disturbance of the training."""

from __future__ import annotations

import io
import math
import re
import sys

import pytest
from rich.console import Console
from rich.jupyter import JupyterMixin

from clearhead.training.progress.console import (
    LineProgress,
    LiveProgress,
    LossHistory,
    TrainingPanel,
    describe_plan,
    progress_for,
    sparkline,
)
from clearhead.training.progress.reports import Pace, RunPlan, StepReport, TrainingProgress, ValidationReport, duration


def plan(*, steps: int | None = 200, seconds: float | None = None, first_step: int = 0) -> RunPlan:
    return RunPlan("de-[en]", first_step, steps, seconds, 10.0 * first_step, 2_600_000, "BLEU")


def report(step: int, loss: float = 3.25) -> StepReport:
    return StepReport(step, loss, 5e-3, tokens=4000, step_seconds=0.5, seconds=0.6 * step)


def run_through(progress: TrainingProgress) -> None:
    progress.begin(plan())
    for step in range(1, 21):
        progress.step(report(step))
    progress.begin_validation(20)
    progress.end_validation(ValidationReport(20, 2.5, 31.5, True, 4.0))
    progress.message("The disk is [nearly] full.")
    progress.end()


def test_a_log_gets_plain_lines() -> None:
    stream = io.StringIO()
    run_through(LineProgress(Console(file=stream), every_seconds=3600.0))
    assert stream.getvalue().splitlines() == [
        "training de-[en]: 2,600,000 parameters, 200 steps",
        "step 1/200  loss 3.2500  learning rate 5.00e-03  8,000 tokens/s  1 min 40 s left",
        "step 20  validating",
        "step 20  validation loss 2.5000  BLEU 31.50  (best so far)  in 4.0 s",
        "The disk is [nearly] full.",
    ]


def test_a_log_gets_no_more_lines_than_asked_for() -> None:
    counts = []
    for every_seconds in (0.0, 3600.0):
        stream = io.StringIO()
        run_through(LineProgress(Console(file=stream), every_seconds=every_seconds))
        counts.append(len(stream.getvalue().splitlines()))
    assert counts == [1 + 20 + 3, 1 + 1 + 3]


def show(progress: LiveProgress) -> str:
    run_through(progress)
    assert isinstance(progress.console.file, io.StringIO)
    return progress.console.file.getvalue()


def test_a_terminal_gets_a_panel_with_everything_a_person_wants_to_know() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=90, color_system=None)
    text = show(LiveProgress(console, every_seconds=0.0))
    last = text[text.rindex("╭") :]
    for words in (
        "de-[en]",
        "20/200",
        "3.2500",
        "5.00e-03",
        "8,000",
        "1 min 30 s left",
        "2.5000",
        "BLEU 31.50",
        "★ best",
    ):
        assert words in last, f"{words} is missing from the last panel:\n{last}"
    assert "The disk is [nearly] full." in text
    assert "validating" in text


def test_what_takes_long_is_counted_on_the_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(LiveProgress, "_watch", lambda self: None)
    console = Console(file=io.StringIO(), force_terminal=True, width=90, color_system=None)
    progress = LiveProgress(console, every_seconds=0.0)
    progress.begin(plan())
    progress.begin_validation(1)
    assert isinstance(console.file, io.StringIO)
    for seconds, expected in ((1.0, ""), (6.0, "validating, 7 s"), (5.0, "validating, 12 s")):
        before, clock[0] = console.file.getvalue(), clock[0] + seconds
        progress.show_waiting()
        drawn = console.file.getvalue().removeprefix(before)
        assert expected in drawn and bool(expected) == bool(drawn)
    progress.end_validation(ValidationReport(1, 2.0, None, True, 12.0))
    assert " training ─╯" in console.file.getvalue()[-30:]
    progress.end()


@pytest.mark.parametrize("width", [20, 40, 200])
def test_a_panel_fits_any_terminal(width: int) -> None:
    panel = TrainingPanel(plan(steps=None))
    for step in range(1, 3):
        panel.step(report(step))
    console = Console(file=io.StringIO(), width=width)
    console.print(panel.render())
    assert isinstance(console.file, io.StringIO)
    assert max(map(len, console.file.getvalue().splitlines())) <= min(width, 78)


def test_the_best_validation_stays_on_the_panel() -> None:
    panel = TrainingPanel(plan())
    panel.step(report(1))
    for step, loss in ((10, 2.0), (20, 3.0), (30, 3.5), (40, 4.0), (50, 4.5)):
        panel.add_validation(ValidationReport(step, loss, None, step == 10, 1.0))
    console = Console(file=io.StringIO(), width=90)
    console.print(panel.render())
    assert isinstance(console.file, io.StringIO)
    lines = [line for line in console.file.getvalue().splitlines() if "validation" in line]
    assert [line.split()[2] for line in lines] == ["10", "40", "50"]
    assert "★ best" in lines[0] and "★" not in "".join(lines[1:])


def test_the_stream_decides_what_is_shown() -> None:
    assert isinstance(progress_for(Console(file=io.StringIO())), LineProgress)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The outputs of a notebook's cell, each with the texts that it showed one after the other."""
    outputs: list[list[str]] = []

    class Handle:
        def __init__(self, shown: list[str]) -> None:
            self.shown = shown

        def update(self, renderable: JupyterMixin) -> None:
            bundle = renderable._repr_mimebundle_((), ())
            assert "<pre" in bundle["text/html"]
            self.shown.append(bundle["text/plain"])

    def display(renderable: JupyterMixin, *, display_id: bool = False) -> Handle | None:
        outputs.append([])
        handle = Handle(outputs[-1])
        handle.update(renderable)
        return handle if display_id else None

    module = type(sys)("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", type(sys)("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return outputs


def test_a_notebook_gets_one_panel_that_is_updated_in_place(notebook: list[list[str]]) -> None:
    stream = io.StringIO()
    progress = progress_for(Console(file=stream, force_jupyter=True))
    assert isinstance(progress, LiveProgress)
    progress.every_seconds = 0.0
    run_through(progress)
    panels, messages = notebook
    assert len(panels) == 1 + 20 + 1 + 1 + 1 and "the first step is running" in panels[0] and "validating" in panels[-3]
    for words in ("de-[en]", "step 20/200", "3.2500", "8,000", "BLEU 31.50", "★ best"):
        assert words in panels[-1]
    assert [text.strip() for text in messages] == ["The disk is [nearly] full."]
    assert stream.getvalue() == "", "a kernel shows standard error as if something had failed"


def test_progress_shows_nothing_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    run_through(TrainingProgress())
    assert capsys.readouterr() == ("", "")


def test_time_left_is_that_of_the_steps_and_validations_to_come() -> None:
    """By the steps and validations that were measured last; before the first validation, by the forecast."""
    pace = Pace(RunPlan("run", 0, 100, None, 0.0, 2, None, validate_every=15, validation_seconds=7.0))
    assert pace.seconds_left is None and pace.fraction is None and pace.tokens_per_second == 0.0
    pace.add(report(15))
    assert pace.seconds_left == pytest.approx(85 * 0.5 + 7 * 7.0)
    pace.add_validation(ValidationReport(15, 2.5, 31.5, True, 4.0))
    assert pace.seconds_left == pytest.approx(85 * 0.5 + 6 * 4.0)
    for step in range(31, 91):
        pace.add(report(step))
    assert pace.tokens_per_second == pytest.approx(8000.0) and pace.fraction == pytest.approx(0.9)
    assert pace.seconds_left == pytest.approx(10 * 0.5 + 2 * 4.0)
    pace.add_validation(ValidationReport(90, 2.5, 31.5, True, 4.0))
    pace.add(report(100))
    assert pace.seconds_left == pytest.approx(4.0)
    pace.add_validation(ValidationReport(100, 2.5, 31.5, True, 4.0))
    assert pace.seconds_left == 0.0


def test_the_nearest_end_counts() -> None:
    pace = Pace(plan(steps=100, seconds=30.0))
    for step in range(1, 41):
        pace.add(report(step))
    assert pace.seconds_left == pytest.approx(30.0 - 24.0)
    assert pace.fraction == pytest.approx(0.8)
    endless = Pace(plan(steps=None))
    endless.add(report(1))
    assert endless.seconds_left is None and endless.fraction is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"), (0.0042, "4.2 ms"), (0.0931, "93 ms"), (0.44, "440 ms"), (4.44, "4.4 s"), (9.96, "10 s"),
        (59.4, "59 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"),
        (3599.6, "1 h 00 min"), (7800, "2 h 10 min"), (360000, "100 h 00 min"),
    ],
)  # fmt: skip
def test_times_read_as_a_person_writes_them(seconds: float, text: str) -> None:
    assert duration(float(seconds)) == text


def test_a_plan_is_described() -> None:
    text = describe_plan(plan(seconds=90.0, first_step=12))
    assert text == "2,600,000 parameters, 200 steps, at most 1 min 30 s, continuing after step 12"


def test_a_sparkline_rises_and_falls_with_its_numbers() -> None:
    assert sparkline([0.0, 7.0], 10) == ("▁█", 0.0, 7.0)
    assert sparkline([float(value) for value in range(8)], 8) == ("▁▂▃▄▅▆▇█", 0.0, 7.0)
    assert sparkline([1.0] * 5, 3) == ("▁▁▁", 1.0, 1.0)
    assert sparkline([math.nan, 2.0, 1.0], 5) == ("█▁", 1.0, 2.0)
    assert sparkline([], 5) == ("", 0.0, 0.0)
    assert sparkline([1.0, 3.0, 9.0, 11.0], 2) == ("▁█", 2.0, 10.0)


def test_the_first_losses_do_not_flatten_a_sparkline() -> None:
    losses = [100.0, 50.0] + [9.0 - step for step in range(8)]
    assert sparkline(losses, 10) == ("███▇▆▅▄▃▂▁", 2.0, 9.0)


def test_the_curve_of_a_panel_says_between_which_losses_it_lies() -> None:
    panel = TrainingPanel(plan())
    for step in range(1, 41):
        panel.step(report(step, 90.0 if step < 5 else 8.0 - step / 10))
    shown = io.StringIO()
    Console(width=80, file=shown).print(panel.render())
    low, high = re.search(r"▁ ([\d.]+) to ([\d.]+) ", shown.getvalue()).groups()  # type: ignore[union-attr]
    assert 3.9 < float(low) < 4.2 and 7 < float(high) < 8


def test_the_loss_history_is_bounded_and_keeps_the_whole_run() -> None:
    history = LossHistory()
    for step in range(10_000):
        history.add(math.exp(-step / 1000))
    assert 100 <= len(history.logarithms) < 400
    assert history.logarithms[0] == pytest.approx(0.0, abs=0.1)
    assert history.logarithms[-1] == pytest.approx(-9.9, abs=0.2)
