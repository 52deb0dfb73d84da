"""Trackers: log the numbers of a run, and no text of its data, to trackio, wandb or TensorBoard."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from clearhead.base.commands import make_install_command
from clearhead.base.errors import InputError
from clearhead.base.files import read_json_object, write_json
from clearhead.training.progress.reports import RunPlan, StepReport, TrainingProgress, ValidationReport

TRACKER_FILE: Final = "tracker.json"
TrackerName = Literal["trackio", "wandb", "tensorboard"]
_MODULES: Final[Mapping[TrackerName, str]] = {
    "trackio": "trackio",
    "wandb": "wandb",
    "tensorboard": "torch.utils.tensorboard",
}
# Switches off everything that wandb would send besides numbers: terminal output, code, command, machine facts.
_WANDB_SETTINGS: Final = {
    "console": "off", "disable_code": True, "disable_git": True, "save_code": False, "silent": True,
    "x_disable_machine_info": True, "x_disable_meta": True, "x_disable_stats": True,
}  # fmt: skip
_PROJECT: Final = "clearhead"


class TrackedProgress(TrainingProgress):
    """Logs the numbers of a run to a tracker, and passes every report on; a failing tracker does not end training.

    Args:
        tracker: the name of the tracker.
        run: the run directory.
        config: the settings of the run, for the tracker's table of runs.
        shown: the display that also receives every report.
        is_resumed: True if the run is resumed; it then continues in the tracker too.

    Raises:
        InputError: the package of the tracker is not installed.
    """

    def __init__(
        self, tracker: TrackerName, run: Path, config: Mapping[str, Any], shown: TrainingProgress, *, is_resumed: bool
    ) -> None:
        try:
            self._module: Any = importlib.import_module(_MODULES[tracker])
        except ImportError:
            raise InputError(
                f'train.tracker = "{tracker}" needs the package {tracker}: install it with '
                f"{make_install_command(extra=tracker)}, or leave train.tracker out"
            ) from None
        self.shown = shown
        self._tracker, self._run, self._config, self._is_resumed = tracker, run, config, is_resumed
        self._writer: Any = None

    def begin(self, plan: RunPlan) -> None:
        """Begin the run in the tracker, or continue it."""
        self.shown.begin(plan)
        self._call_tracker(partial(self._begin_tracking, plan))

    def step(self, report: StepReport) -> None:
        """Log the numbers of one step."""
        self.shown.step(report)
        speed = report.tokens / max(report.step_seconds, 1e-9)
        values = {"loss/train": report.loss, "learning_rate": report.learning_rate, "tokens_per_second": speed}
        self._write(values, report.step)

    def begin_validation(self, step: int) -> None:
        """Report the start of a validation to the display."""
        self.shown.begin_validation(step)

    def end_validation(self, report: ValidationReport) -> None:
        """Log the numbers of one validation."""
        self.shown.end_validation(report)
        score = {} if report.score is None else {"score/valid": report.score}
        self._write({"loss/valid": report.loss, **score}, report.step)

    def message(self, text: str) -> None:
        """Show a message on the display."""
        self.shown.message(text)

    def end(self) -> None:
        """Write all numbers out, and end the run in the tracker."""
        self.shown.end()
        if self._writer is not None:
            # finish of the module, not of its run: trackio would finish the run again at exit, and print a line.
            self._call_tracker(self._writer.close if self._tracker == "tensorboard" else self._module.finish)

    def _begin_tracking(self, plan: RunPlan) -> None:
        if self._tracker == "tensorboard":
            # Numbers that a killed run logged after its last checkpoint are removed.
            folder = str(self._run / "tensorboard")
            self._writer = self._module.SummaryWriter(folder, purge_step=plan.first_step + 1)
            return
        file = self._run / TRACKER_FILE
        if not (self._is_resumed and file.is_file()):
            write_json(file, {"id": uuid.uuid4().hex[:12]})
        key = str(read_json_object(file, what="the id of a run in its tracker")["id"])
        name = f"{self._run.resolve().name}-{key}"
        project = os.environ.get("WANDB_PROJECT", _PROJECT)
        options = {"project": project, "name": name, "config": {**self._config, "parameters": plan.parameters}}
        if self._tracker == "wandb":
            # Not in the run directory, because wandb creates links.
            options |= {"id": key, "mode": os.environ.get("WANDB_MODE", "offline"), "settings": dict(_WANDB_SETTINGS)}
        self._writer = self._module.init(**options, resume="allow")
        self.shown.message(f"{self._tracker}: project {project}, run {name}")

    def _write(self, values: Mapping[str, float], step: int) -> None:
        if self._writer is not None:
            self._call_tracker(partial(self._log, values, step))

    def _log(self, values: Mapping[str, float], step: int) -> None:
        if self._tracker == "tensorboard":
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        else:
            self._module.log(dict(values), step=step)

    def _call_tracker(self, call: Callable[[], object]) -> None:
        """Call a tracker with its output sent to stderr; after a failure it is not called again."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                call()
        except Exception as error:  # noqa: BLE001 - the code of another package
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self.shown.message(f"{self._tracker} failed; the run goes on without it: {reason}")
            self._writer = None
