"""The mean of a run's newest checkpoints, as weights of the run."""

from __future__ import annotations

from pathlib import Path

from clearhead.base.errors import InputError
from clearhead.base.files import refuse_absent
from clearhead.checkpoints.reference import ModelReference
from clearhead.checkpoints.runs.checkpoint import clear_leftovers, recent_folder, undamaged_weights
from clearhead.checkpoints.runs.directory import is_run_directory, open_run
from clearhead.checkpoints.runs.extra_weights import save_averaged
from clearhead.checkpoints.weights.files import load_merged
from clearhead.training.optim.weight_averages import average_checkpoints


def average_run(run: Path, last: int) -> tuple[Path, list[int]]:
    """Average the weights of a run's newest checkpoints, recent weights included.

    Args:
        run: the run directory.
        last: how many, at least 1.

    Returns:
        The file of the averaged weights, and the averaged steps in ascending order.

    Raises:
        InputError: the folder is not a run, is in use, or has fewer undamaged checkpoints.
    """
    reference = ModelReference.parse(str(run))
    if reference.label is not None and is_run_directory(reference.folder):
        raise InputError(
            f"{run} names one checkpoint, but the last ones of a run are averaged: name {reference.folder}"
        )
    refuse_absent(run, "run directory")
    if not is_run_directory(run):
        raise InputError(f"{run} is not a run directory: it has no checkpoints folder.")
    # Not snapshots: the checkpoints that are averaged are as far apart as validations.
    files = undamaged_weights(recent_folder(run), run / "checkpoints")
    files.pop(0, None)
    if last > len(files):
        kept = ", ".join(map(str, files)) or "none"
        raise InputError(
            f"{run} has {len(files)} undamaged checkpoints to average (steps: {kept}), fewer than --last {last}: "
            "average fewer, or train with a larger train.keep"
        )
    steps = list(files)[-last:]
    with open_run(run, resume=True):
        clear_leftovers(run)
        weights = average_checkpoints([load_merged(files[step]) for step in steps])
        file = save_averaged(run, weights, {"steps": steps, "valid_loss": None, "valid_score": None})
    return file, steps
