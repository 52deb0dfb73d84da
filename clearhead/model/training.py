"""Training from Python, with a run file or a dictionary of its tables, and with data in files or lists."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clearhead.base.arguments import check_types
from clearhead.base.errors import InputError, RunFailure, did_you_mean
from clearhead.base.files import read_text_file
from clearhead.base.progress import use_display
from clearhead.checkpoints.runs.checkpoint import checkpoint_steps
from clearhead.data.sources.examples import json_lines, json_lines_entry
from clearhead.data.sources.tables import Examples
from clearhead.data.sources.texts import TextTable
from clearhead.data.task_tables import TEXT_EXAMPLES, data_of
from clearhead.model.facade import Model
from clearhead.model.loading import load
from clearhead.spec.tasks.registry import task_kinds
from clearhead.training.assemble import train_run
from clearhead.training.parallel.meeting import reporting_faults
from clearhead.training.parallel.world import Process
from clearhead.training.progress.console import progress_for
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.record import RunResult
from clearhead.training.runfile.read import extensions_folder, parse_run_file, parse_tables, toml_text, toml_value
from clearhead.training.runfile.sections import RunFile

_PARTS = ("train", "valid")


@dataclass(frozen=True, repr=False)
class TrainResult(RunResult):
    """Result of a run; its `load` method loads the trained model."""

    def load(self, *, device: str = "auto", precision: str = "auto") -> Model:
        """Load the trained model with its best weights; the arguments are those of `clearhead.load`."""
        return load(self.run, device=device, precision=precision)


@check_types
def train(
    run_file: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    data: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Train a model, as `clearhead train` does.

    Args:
        run_file: the path of a run file, or its tables: {"task": {...}, "data": {...}, "train": {...}}.
        overrides: values by dotted key, such as {"train.steps": 100}. None means no overrides.
        resume: True to continue from the newest undamaged checkpoint of the run directory.
        data: lists of examples instead of files: "train", and "valid" unless `valid` of the run file is a share.
            Examples are those of `Model.evaluate`; a task of another package defines its own. They are written into the
            run directory, so a resumed run does not need them. None means the files that the run file names.

    Returns:
        The run directory, the number of steps, the best checkpoint and the time. Its `load()` returns the model.

    Raises:
        InputError: the run file or the data cannot be used; all faults of the run file are in one report.
        RunFailure: training failed; the last checkpoint is complete.
    """
    if isinstance(run_file, Mapping):
        for table, values in run_file.items():
            if not isinstance(values, Mapping):
                raise InputError(
                    f"the run file: expected a dictionary of keys for the table '{table}', got {values!r:.80}"
                )
        text, name, where = toml_text(run_file), "the run file", extensions_folder(Path("run.toml"))
    else:
        text, name, where = read_text_file(Path(run_file), "run file"), str(run_file), extensions_folder(Path(run_file))
    changes = [f"{key}={toml_value(value)}" for key, value in (overrides or {}).items()]
    if data is None:
        return TrainResult(**vars(train_run(_check(text, name, changes, where), resume=resume)))
    if Process.here().size > 1:
        raise InputError("lists of data work in one process only: write them to files, and name the files in [data]")
    if resume:
        raise InputError("a resumed run reads the data from its run directory: leave `data` out")
    tables = parse_tables(text, name, changes)
    kind, folder = str(tables.get("task", {}).get("kind")), Path(str(tables.get("train", {}).get("run", ""))) / "data"
    form = data_of(kind).forms[0] if kind in task_kinds() else TextTable
    progress = progress_for()
    with use_display(progress):
        parts = _hold_out({split: _examples(split, examples, kind) for split, examples in data.items()}, kind, tables)
    files = {folder / f"{split}.jsonl": examples for split, examples in parts.items()}
    entries = [f"data.{path.stem}={toml_value(json_lines_entry(rows, path, form))}" for path, rows in files.items()]
    return _train_on(parse_run_file(text, name, [*changes, *entries], folder=where), files, progress)


def _check(text: str, name: str, changes: list[str], folder: Path | None) -> RunFile:
    """Parse a run file, and report its faults to the other processes of the training."""
    process = Process.here()
    if process.size == 1:
        return parse_run_file(text, name, changes, folder=folder)
    with reporting_faults(process):
        return parse_run_file(text, name, changes, folder=folder)


def _hold_out(parts: dict[str, Examples], kind: str, tables: Mapping[str, Any]) -> dict[str, Examples]:
    """Move training examples to a validation set if `valid` of the run file is a fraction, such as 0.1."""
    share = tables.get("data", {}).get("valid")
    if parts.keys() != {"train"} or kind not in task_kinds() or not isinstance(share, float) or not 0.0 < share < 1.0:
        return parts
    train = parts["train"]
    held = data_of(kind).hold_out(train, share, tables["task"])
    rows = [row for row in range(len(train.records)) if row not in held], sorted(held)
    records = [[train.records[row] for row in numbers] for numbers in rows]
    return {name: replace(train, records=side) for name, side in zip(_PARTS, records, strict=True)} if held else parts


def _examples(split: str, examples: Any, kind: str) -> Examples:
    """Convert a list of examples to records of the task `kind`; the run file's check refuses an unknown task."""
    if split not in _PARTS:
        raise InputError(f"`data` has an unknown key '{split}'{did_you_mean(split, _PARTS)}; expected train and valid")
    listed = data_of(kind).examples if kind in task_kinds() else TEXT_EXAMPLES
    return listed.parse(examples, name=f"data['{split}']")


def _train_on(run_file: RunFile, files: Mapping[Path, Examples], progress: TrainingProgress) -> TrainResult:
    """Write the data into the run directory and train; delete the directory if training fails before step 1."""
    run = Path(run_file.train.run)
    if run.exists():
        raise InputError(f"{run} exists: name a new run directory with train.run, or continue it with resume=True")
    try:
        for path, examples in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json_lines(examples), encoding="utf-8")
        return TrainResult(**vars(train_run(run_file, progress=progress)))
    except (InputError, RunFailure):
        if max(checkpoint_steps(run), default=0) == 0:
            shutil.rmtree(run, ignore_errors=True)
        raise
