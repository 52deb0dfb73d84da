"""The weights of the last validated checkpoints, kept for averaging after their checkpoints are gone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from clearhead.files import read_json_object
from clearhead.runs.checkpoint import WEIGHTS, checkpoint_damage, checkpoint_folder, remove_folder, writing_folder
from clearhead.runs.directory import AVERAGED, measured_weights
from clearhead.weights.files import load_tensors, save_tensors

ABOUT: Final = "average.json"


def keep_recent(run: Path, step: int) -> None:
    """Keep the validated weights of a checkpoint after the checkpoint is deleted.

    Raises:
        RunFailure: the disk is full or refuses the write.
    """
    source = measured_weights(checkpoint_folder(run, step))
    with writing_folder(_folder(run, step)) as temporary:
        try:
            # A hard link takes no space while the checkpoint exists.
            os.link(source, temporary / WEIGHTS)
        except OSError:
            shutil.copyfile(source, temporary / WEIGHTS)


def prune_recent(run: Path, *, keep: int) -> None:
    """Delete all but the last `keep` recent weights."""
    for step in _kept_steps(run)[:-keep]:
        remove_folder(_folder(run, step))


def restore_recent(run: Path, steps: Sequence[int]) -> list[str]:
    """Restore the recent weights of a checkpoint: later ones are deleted, missing ones copied from their checkpoints.

    Args:
        run: the run directory.
        steps: whose weights the checkpoint lists as recent.

    Returns:
        One message for each step whose weights are missing or damaged.
    """
    for step in _kept_steps(run):
        if step > max(steps, default=0):
            remove_folder(_folder(run, step))
    lost = []
    for step in steps:
        folder = _folder(run, step)
        if checkpoint_damage(folder) is None:
            continue
        if checkpoint_damage(checkpoint_folder(run, step)) is None:
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
    return [load_tensors(folder / WEIGHTS) for folder in folders if checkpoint_damage(folder) is None]


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


def about_averaged(run: Path) -> dict[str, Any] | None:
    """Return the JSON values about the averaged weights; None if there are none or they are damaged."""
    folder = run / "checkpoints" / AVERAGED
    if checkpoint_damage(folder) is not None or not (folder / ABOUT).exists():
        return None
    about: dict[str, Any] = read_json_object(folder / ABOUT, what="a record of averaged weights")
    return about


def recent_folder(run: Path) -> Path:
    """Return the folder of the recent weights."""
    return run / "checkpoints" / "recent"


def _folder(run: Path, step: int) -> Path:
    return recent_folder(run) / f"step-{step}"


def _kept_steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in recent_folder(run).glob("step-*"))
