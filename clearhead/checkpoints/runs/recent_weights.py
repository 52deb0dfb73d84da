"""The weights of the last validated checkpoints, kept for averaging after their checkpoints are gone."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from torch import Tensor

from clearhead.base.errors import InputError
from clearhead.base.files import read_typed
from clearhead.checkpoints.runs.checkpoint import (
    WEIGHTS,
    checkpoint_folder,
    link_weights,
    remove_folder,
    steps_in,
    weights_damage,
    writing_folder,
)
from clearhead.checkpoints.runs.directory import AVERAGED
from clearhead.checkpoints.runs.manifest import manifest_damage
from clearhead.checkpoints.weights.files import load_weights, save_tensors

ABOUT: Final = "average.json"


def keep_recent(run: Path, step: int) -> None:
    """Keep the validated weights of a checkpoint after the checkpoint is deleted.

    Raises:
        RunFailure: the disk is full or refuses the write.
    """
    link_weights(run, step, _folder(run, step))


def prune_recent(run: Path, *, keep: int) -> None:
    """Delete all but the last `keep` recent weights."""
    for step in steps_in(recent_folder(run))[:-keep]:
        remove_folder(_folder(run, step))


def restore_recent(run: Path, steps: Sequence[int]) -> list[str]:
    """Restore the recent weights of a checkpoint: later ones are deleted, missing ones copied from their checkpoints.

    Args:
        run: the run directory.
        steps: whose weights the checkpoint lists as recent.

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
            lost.append(
                f"The weights of step {step}, kept for averaging in {folder}, are missing or damaged; "
                "they are left out of the average."
            )
    return lost


def load_recent(run: Path, steps: Sequence[int]) -> list[dict[str, Tensor]]:
    """Load the recent weights that are undamaged, in the order of `steps`."""
    folders = [_folder(run, step) for step in steps]
    return [load_weights(folder / WEIGHTS) for folder in folders if weights_damage(folder) is None]


def save_averaged(run: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """Write averaged weights to the folder of `RUN@averaged`.

    Args:
        run: the run directory.
        weights: the module's state dict.
        about: JSON values about the average: its steps and its validation.

    Raises:
        RunFailure: the disk is full or refuses the write.
    """
    folder = run / "checkpoints" / AVERAGED
    with writing_folder(folder) as temporary:
        save_tensors(temporary / WEIGHTS, weights)
        (temporary / ABOUT).write_text(json.dumps(about), encoding="utf-8")
    return folder / WEIGHTS


class About(BaseModel):
    """What is kept about averaged weights: the steps that they are the mean of, and their validation."""

    steps: list[int]
    valid_loss: float | None = None
    valid_score: float | None = None


def about_averaged(run: Path) -> About | None:
    """Return what is known about the averaged weights; None if there are none or they are damaged."""
    folder = run / "checkpoints" / AVERAGED
    if manifest_damage(folder, needed=(WEIGHTS, ABOUT), name=AVERAGED) is not None:
        return None
    with contextlib.suppress(InputError):
        return read_typed(folder / ABOUT, About, what="a record of averaged weights")
    return None


def recent_folder(run: Path) -> Path:
    """Return the folder of the recent weights."""
    return run / "checkpoints" / "recent"


def _folder(run: Path, step: int) -> Path:
    return recent_folder(run) / f"step-{step}"
