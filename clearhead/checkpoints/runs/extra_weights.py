"""Weights of a run without the state of training: recent and averaged weights, and snapshots.

Recent weights are those of the last validated checkpoints. They stay for averaging after the checkpoints are deleted.
Snapshots are the weights of a few steps with logarithmic spacing, which show how the model developed.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.base.files import read_typed
from clearhead.checkpoints.runs.checkpoint import (
    AVERAGED,
    WEIGHTS,
    checkpoint_folder,
    link_weights,
    recent_folder,
    remove_folder,
    snapshots_folder,
    steps_in,
    weights_damage,
    write_folder,
)
from clearhead.checkpoints.runs.manifest import manifest_damage
from clearhead.checkpoints.weights.files import load_weights, save_tensors

AVERAGE_FILE: Final = "average.json"
SNAPSHOT_SPAN: Final = 1000
"""Ratio of the step of the newest snapshot to the step of the snapshot that it replaces."""


def keep_recent(run: Path, step: int) -> None:
    """Link or copy the validated weights of a checkpoint, which then stay when the checkpoint is deleted.

    Raises:
        RunFailure: the disk is full or refuses the write.
    """
    link_weights(run, step, _folder(run, step))


def prune_recent(run: Path, *, keep: int) -> None:
    """Delete the recent weights of a run except those of its last `keep` steps."""
    for step in steps_in(recent_folder(run))[:-keep]:
        remove_folder(_folder(run, step))


def restore_recent(run: Path, steps: Sequence[int]) -> list[str]:
    """Restore the recent weights that a checkpoint lists: delete later ones, and copy missing ones from checkpoints.

    Args:
        run: the run directory.
        steps: the steps that the checkpoint lists as recent.

    Returns:
        One message for each step whose weights are missing or damaged.
    """
    for step in steps_in(recent_folder(run)):
        if step > max(steps, default=0):
            remove_folder(_folder(run, step))
    lost = []
    for step in steps:
        folder = _folder(run, step)
        if weights_damage(folder) is None:
            continue
        if weights_damage(checkpoint_folder(run, step)) is None:
            keep_recent(run, step)
        else:
            lost.append(f"The weights of step {step} in {folder} are missing or damaged; the average leaves them out")
    return lost


def load_recent(run: Path, steps: Sequence[int]) -> list[dict[str, Tensor]]:
    """Load the undamaged recent weights in the order of `steps`."""
    folders = [_folder(run, step) for step in steps]
    return [load_weights(folder / WEIGHTS) for folder in folders if weights_damage(folder) is None]


def save_averaged(run: Path, weights: Mapping[str, Tensor], record: Mapping[str, Any]) -> Path:
    """Write averaged weights to the folder of `RUN@averaged`.

    Args:
        run: the run directory.
        weights: the module's state dict.
        record: JSON values about the average: its steps and its validation.

    Raises:
        RunFailure: the disk is full or refuses the write.
    """
    folder = run / "checkpoints" / AVERAGED
    with write_folder(folder) as temporary:
        save_tensors(temporary / WEIGHTS, weights)
        (temporary / AVERAGE_FILE).write_text(json.dumps(record), encoding="utf-8")
    return folder / WEIGHTS


class AverageRecord(BaseModel):
    """Record of averaged weights: the steps in the mean, and the validation of the average."""

    steps: list[int]
    valid_loss: float | None = None
    valid_score: float | None = None


def read_average_record(run: Path) -> AverageRecord | None:
    """Return the record of the averaged weights; None if there are none or they are damaged."""
    folder = run / "checkpoints" / AVERAGED
    if manifest_damage(folder, needed=(WEIGHTS, AVERAGE_FILE), name=AVERAGED) is not None:
        return None
    with contextlib.suppress(InputError):
        return read_typed(folder / AVERAGE_FILE, AverageRecord, what="a record of averaged weights")
    return None


def _folder(run: Path, step: int) -> Path:
    return recent_folder(run) / f"step-{step}"


def snapshot_folder(run: Path, step: int) -> Path:
    """Return the folder of the snapshot of one step."""
    return snapshots_folder(run) / f"step-{step}"


def is_snapshot_step(step: int, count: int) -> bool:
    """Return whether a run that keeps `count` snapshots takes a snapshot at a step.

    Snapshots are taken at step 0 and at the rounded steps `SNAPSHOT_SPAN ** (i / (count - 1))` for i = 0, 1, 2 and so
    on. These do not depend on the length of the run, so a resumed run takes the same snapshots.
    """
    if step == 0 or count < 2:
        return step == 0 < count
    power = math.log(SNAPSHOT_SPAN) / (count - 1)
    return round(math.exp(power * round(math.log(step) / power))) == step


def prune_snapshots(run: Path, *, newest: int, keep: int) -> None:
    """Delete old snapshots; step 0, the newest `keep` - 1, and the newest `keep` - 1 up to a checkpoint remain.

    Args:
        run: the run directory.
        newest: the step of the last checkpoint. A killed run resumes there and needs the snapshots before it.
        keep: the number of snapshots to keep, step 0 included. As many are kept up to the last checkpoint.
    """
    later = [step for step in steps_in(snapshots_folder(run)) if step > 0]
    until = [step for step in later if step <= newest]
    kept_steps = {step for steps in (later, until) for step in steps[max(0, len(steps) - keep + 1) :]}
    for step in later:
        if step not in kept_steps:
            remove_folder(snapshot_folder(run, step))


def cut_back_snapshots(run: Path, step: int) -> None:
    """Delete the snapshots after a step."""
    for later in steps_in(snapshots_folder(run)):
        if later > step:
            remove_folder(snapshot_folder(run, later))
