"""The weights of the last validated checkpoints, kept for averaging after their checkpoints are gone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from clearhead.runs.checkpoint import WEIGHTS, checkpoint_damage, checkpoint_folder, remove_folder, writing_folder
from clearhead.runs.directory import AVERAGED, measured_weights
from clearhead.weights.files import load_tensors, save_tensors

ABOUT: Final = "average.json"


def add_to_ring(run: Path, step: int) -> None:
    """Keep the validated weights of a checkpoint beyond the checkpoint's own life.

    Raises:
        RunFailure: the disk is full or refuses the write.
    """
    source = measured_weights(checkpoint_folder(run, step))
    with writing_folder(_member(run, step)) as temporary:
        try:
            # A second name for the same bytes costs no room while the checkpoint is there
            os.link(source, temporary / WEIGHTS)
        except OSError:
            shutil.copyfile(source, temporary / WEIGHTS)


def prune_ring(run: Path, *, keep: int) -> None:
    """Drop all but the last `keep` members of the ring."""
    for step in _kept_steps(run)[:-keep]:
        remove_folder(_member(run, step))


def restore_ring(run: Path, steps: Sequence[int]) -> list[str]:
    """Make the ring what it was at a checkpoint: later members go, a missing one comes back from its checkpoint.

    Returns:
        One sentence for each member that is lost or damaged.
    """
    for step in _kept_steps(run):
        if step > max(steps, default=0):
            remove_folder(_member(run, step))
    lost = []
    for step in steps:
        member = _member(run, step)
        if checkpoint_damage(member) is None:
            continue
        if checkpoint_damage(checkpoint_folder(run, step)) is None:
            add_to_ring(run, step)
        else:
            lost.append(
                f"The weights of step {step}, kept for averaging in {member}, are missing or damaged; "
                "the average goes without them."
            )
    return lost


def ring_weights(run: Path, steps: Sequence[int]) -> list[dict[str, Tensor]]:
    """Read the members of the ring that are sound, in the order of `steps`."""
    members = [_member(run, step) for step in steps]
    return [load_tensors(member / WEIGHTS) for member in members if checkpoint_damage(member) is None]


def save_averaged(run: Path, weights: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """Write averaged weights where `RUN@averaged` finds them.

    Args:
        run: the run directory.
        weights: the module's state dict.
        about: JSON values that say what was averaged.

    Raises:
        RunFailure: the disk is full or refuses the write.
    """
    folder = run / "checkpoints" / AVERAGED
    with writing_folder(folder) as temporary:
        save_tensors(temporary / WEIGHTS, weights)
        (temporary / ABOUT).write_text(json.dumps(about), encoding="utf-8")
    return folder / WEIGHTS


def about_averaged(run: Path) -> dict[str, Any] | None:
    """Return what was averaged, or None where there is no sound average."""
    folder = run / "checkpoints" / AVERAGED
    if checkpoint_damage(folder) is not None or not (folder / ABOUT).exists():
        return None
    about: dict[str, Any] = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    return about


@contextlib.contextmanager
def weights_in_place(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Give a module other weights, and its own ones back afterwards."""
    own = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(weights)
    try:
        yield
    finally:
        module.load_state_dict(own)


def _member(run: Path, step: int) -> Path:
    return run / "checkpoints" / "ring" / f"step-{step}"


def _kept_steps(run: Path) -> list[int]:
    ring = run / "checkpoints" / "ring"
    names = [entry.name for entry in ring.iterdir()] if ring.is_dir() else []
    return sorted(int(name.removeprefix("step-")) for name in names if name.startswith("step-"))
