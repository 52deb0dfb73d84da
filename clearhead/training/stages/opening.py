"""The first stage: the processes meet, the run directory is open, and what a resumed run remembers is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clearhead.checkpoints.runs.checkpoint import checkpoint_steps, saved_choices
from clearhead.checkpoints.runs.directory import RunDirectory, open_run
from clearhead.fast.busy_waiting import adapt_waiting
from clearhead.training.data_files import changed_files
from clearhead.training.dry_run import memory_in_use
from clearhead.training.kernel_cache import limit_kernel_cache
from clearhead.training.parallel.agreement import check_run_is_seen, check_same_everywhere
from clearhead.training.parallel.joining import joined, own_device
from clearhead.training.parallel.processes import Process, Processes
from clearhead.training.progress.reports import Progress
from clearhead.training.progress.tracker import TrackedProgress
from clearhead.training.runfile.read import to_toml
from clearhead.training.runfile.sections import RunFile

# The keys that may change when a run is resumed: its length and what it keeps, not what its next step computes.
_MAY_DIFFER = """
    run steps epochs seconds planned_minutes parallel activation_checkpointing device threads
    save_every keep snapshots snapshot_megabytes early_stop.patience tracker
"""
MAY_DIFFER = ["model.parts", *(f"train.{key}" for key in _MAY_DIFFER.split())]  # the spec has the digest of the file


@dataclass(frozen=True)
class OpenedRun:
    """A run whose directory is open.

    Attributes:
        path: the run directory.
        run_file: the checked run file; on the first process with the precision that the run has already.
        is_resumed: whether it continues from a checkpoint.
        choices: that were made once when a resumed run began; empty for a new one.
        processes: that train together.
        directory: None: the first process has opened it.
        progress: receives the reports; those of the first process are shown.
        device: of this process.
        memory_before: bytes that this process held before it read the data.
    """

    path: Path
    run_file: RunFile
    is_resumed: bool
    choices: Mapping[str, Any]
    processes: Processes
    directory: RunDirectory | None
    progress: Progress
    device: torch.device
    memory_before: int


@contextlib.contextmanager
def opened(run_file: RunFile, *, resume: bool, progress: Progress) -> Iterator[OpenedRun]:
    """Join the other processes and open the run directory for the length of a with block.

    Args:
        run_file: the checked run file.
        resume: whether to continue from the newest undamaged checkpoint.
        progress: receives the reports.

    Raises:
        InputError: the run directory or the device cannot be used, processes differ, or the training data has changed.
    """
    run, process = Path(run_file.train.run), Process.here()
    adapt_waiting()
    with joined(process, run, device=run_file.train.device) as processes, contextlib.ExitStack() as stack:
        check_same_everywhere(processes, run_file)
        # torchrun starts all processes anew after one of them broke down.
        resume = processes.first_of(resume or (process.restarts > 0 and bool(checkpoint_steps(run))))
        directory, saved = None, dict[str, Any]()
        if processes.is_first:
            # Without resume as well: a run that is there is then refused as such, not as one of another precision.
            saved = saved_choices(run) or {}
            if run_file.train.precision == "auto" and "precision" in saved:
                run_file = with_precision(run_file, saved["precision"])
            # Without a sound checkpoint, which is refused later, the precision of the run is not known.
            may_differ = MAY_DIFFER if saved else [*MAY_DIFFER, "train.precision"]
            directory = stack.enter_context(
                open_run(run, configuration=to_toml(run_file), resume=resume, may_differ=may_differ)
            )
            if run_file.train.tracker != "none":
                config = _tracked(run_file)
                progress = TrackedProgress(run_file.train.tracker, run, config, progress, is_resumed=resume)
        else:
            progress = Progress()
        device = own_device(run_file.train.device, process)
        limit_kernel_cache()
        memory_before = memory_in_use(device)
        choices = processes.first_of(saved if resume else {})
        check_run_is_seen(processes, run)
        for change in changed_files(choices, run_file, run):
            progress.message(change)
        yield OpenedRun(run, run_file, resume, choices, processes, directory, progress, device, memory_before)


def _tracked(run_file: RunFile) -> dict[str, object]:
    """Return what a tracker learns of a run file: nothing of its data, and no path."""
    tables = run_file.model_dump(mode="json", include={"tokenizer", "model", "lora", "train"}, exclude_none=True)
    for table, key in (("tokenizer", "path"), ("model", "spec"), ("model", "parts"), ("train", "run")):
        tables[table].pop(key, None)
    return {"task": run_file.task.kind, **tables}


def with_precision(run_file: RunFile, precision: str) -> RunFile:
    """Return a run file that names the precision that "auto" turned out to be."""
    return run_file.model_copy(update={"train": run_file.train.model_copy(update={"precision": precision})})
