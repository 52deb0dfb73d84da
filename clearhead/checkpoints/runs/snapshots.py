"""Snapshots: the weights alone of a few steps of a run, spaced like a logarithm, which show how its model formed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from clearhead.checkpoints.runs.checkpoint import remove_folder, steps_in

SPAN: Final = 1000
"""How many times as late a snapshot is as the one that it replaces."""


def snapshots_folder(run: Path) -> Path:
    """Return the folder of a run's snapshots."""
    return run / "checkpoints" / "snapshots"


def snapshot_folder(run: Path, step: int) -> Path:
    """Return the folder of the snapshot of one step."""
    return snapshots_folder(run) / f"step-{step}"


def is_snapshot_step(step: int, count: int) -> bool:
    """Return whether a run that keeps so many snapshots takes one at this step.

    It does at step 0 and at the powers of a number, rounded, of which `count - 1` make a factor of `SPAN`. They depend
    on nothing else, least of all on the length of the run, so a resumed run takes the same ones.
    """
    if step == 0 or count < 2:
        return step == 0 < count
    power = math.log(SPAN) / (count - 1)
    return round(math.exp(power * round(math.log(step) / power))) == step


def prune_snapshots(run: Path, *, newest: int, keep: int) -> None:
    """Delete all snapshots but that of step 0 and the newest, `keep` in all; and as many up to the last checkpoint.

    Args:
        run: the run directory.
        newest: the step of the last checkpoint: a run that is killed goes back to it, and needs those before.
        keep: number of snapshots to keep.
    """
    later = [step for step in steps_in(snapshots_folder(run)) if step > 0]
    until = [step for step in later if step <= newest]
    kept = {step for steps in (later, until) for step in steps[max(0, len(steps) - keep + 1) :]}
    for step in later:
        if step not in kept:
            remove_folder(snapshot_folder(run, step))


def cut_back_snapshots(run: Path, step: int) -> None:
    """Delete the snapshots after a step."""
    for later in steps_in(snapshots_folder(run)):
        if later > step:
            remove_folder(snapshot_folder(run, later))
