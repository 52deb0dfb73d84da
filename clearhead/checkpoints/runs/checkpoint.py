"""Checkpoints: folders of safetensors and JSON, written atomically.

A checkpoint is written under a temporary name, synced to the disk and renamed. So a process that dies at any moment
leaves the earlier checkpoints intact. The manifest, written last, has the size and SHA-256 of every file to detect
damage. Tensors go to safetensors files and everything else to JSON. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from safetensors import SafetensorError
from torch import Tensor

from clearhead.base.errors import InputError, RunFailure
from clearhead.base.files import convert_json, read_json_object, read_model_text, refuse_link_out, replacing, sync
from clearhead.base.formats import FileFormat
from clearhead.base.temporary_files import TEMPORARY, remove, temporary_path
from clearhead.checkpoints.runs.manifest import manifest_damage, seal
from clearhead.checkpoints.weights.files import load_tensors, refuse_dtypes, save_tensors

FORMAT: Final = FileFormat("a checkpoint", 2, "start the run again")
MOST_THREADS: Final = 1024
WEIGHTS: Final = "weights.safetensors"
AVERAGED_WEIGHTS: Final = "ema.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
STATE: Final = "state.json"
AVERAGED: Final = "averaged"
UNTOUCHED: Final = "earlier checkpoints are untouched, and the run continues from them with --resume"
NOTHING_TRAINED: Final = "no step was taken: make room there, or name another folder with train.run, and start again"

_STEP_NAME: Final = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_OS_ERROR_NUMBER: Final = re.compile(r"os error (\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """State of training after one step, for exact resumption.

    Attributes:
        step: the number of optimizer steps.
        weights: the module's state dict; tied tensors may appear under several names.
        optimizer: the optimizer's state dict.
        ema: the exponential moving average of the weights. None means that there is none.
        state: JSON values, such as counters, random states, the position in the data and automatic choices.
    """

    step: int
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    ema: Mapping[str, Tensor] | None
    state: Mapping[str, Any]


@dataclass
class Tally:
    """Counters of a run, saved in every checkpoint.

    Attributes:
        step: the number of optimizer steps.
        tokens: the number of source and target tokens seen.
        seconds: the wall-clock time in seconds, over all resumptions.
        best_step: the step of the best validation. None means that there was no validation yet.
        best_value: the loss or score of the best validation.
        misses: the number of validations since the best one.
        validated_step: the last step that was validated.
        logged_step: the last step with a line of metrics.
        recent: the last validated steps, for averaging.
        loss_sum, loss_count: the sum of the training loss and the number of labels since the last line of metrics.
        window_tokens, window_seconds: the tokens and the training time in seconds since the last line of metrics.
        validation_seconds: the duration of the last validation; before the first one, its forecast.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_value: float | None = None
    misses: int = 0
    validated_step: int = 0
    logged_step: int = 0
    recent: list[int] = field(default_factory=list)
    loss_sum: float = 0.0
    loss_count: int = 0
    window_tokens: int = 0
    window_seconds: float = 0.0
    validation_seconds: float = 0.0


def checkpoint_folder(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint of one step."""
    return run / "checkpoints" / f"step-{step}"


def recent_folder(run: Path) -> Path:
    """Return the folder of a run's recent weights, which are used for averaging."""
    return run / "checkpoints" / "recent"


def snapshots_folder(run: Path) -> Path:
    """Return the folder of a run's snapshots."""
    return run / "checkpoints" / "snapshots"


def checkpoint_steps(run: Path) -> list[int]:
    """Return the steps that have a checkpoint folder, damaged ones included, in ascending order."""
    return steps_in(run / "checkpoints")


def steps_in(folder: Path) -> list[int]:
    """Return the steps with a subfolder in a folder of a run, in ascending order; links do not count.

    Raises:
        InputError: the folder is a link out of the run.
    """
    if not folder.is_dir():
        return []
    refuse_link_out(folder, folder.parent)
    folders = (entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink())
    matches = (_STEP_NAME.fullmatch(entry.name) for entry in folders)
    return sorted(int(match[1]) for match in matches if match)


def save_checkpoint(
    run: Path, checkpoint: Checkpoint, *, save: Callable[[Path, Mapping[str, Tensor]], None] = save_tensors
) -> Path:
    """Write one checkpoint atomically.

    Args:
        run: the run directory.
        checkpoint: the checkpoint; it replaces an earlier one of the same step.
        save: the function that writes named tensors to a safetensors file.

    Returns:
        The checkpoint's folder.

    Raises:
        RunFailure: the disk is full or refuses the write; earlier checkpoints are untouched.
    """
    folder = checkpoint_folder(run, checkpoint.step)
    values, _ = _split_optimizer(checkpoint.optimizer)
    state = {**FORMAT.header(), "step": checkpoint.step, "optimizer": values, **checkpoint.state}
    is_first = not any(step < checkpoint.step for step in checkpoint_steps(run))
    with write_folder(folder, otherwise=NOTHING_TRAINED if is_first else UNTOUCHED) as temporary:
        for name, tensors in tensor_files(checkpoint):
            save(temporary / name, tensors)
        (temporary / STATE).write_text(json.dumps(state, allow_nan=False), encoding="utf-8")
    return folder


def tensor_files(checkpoint: Checkpoint) -> list[tuple[str, Mapping[str, Tensor]]]:
    """Return the names of a checkpoint's safetensors files and their tensors, in the order of writing."""
    files = [(WEIGHTS, checkpoint.weights), (OPTIMIZER, _split_optimizer(checkpoint.optimizer)[1])]
    return files + ([(AVERAGED_WEIGHTS, checkpoint.ema)] if checkpoint.ema is not None else [])


def load_checkpoint(
    folder: Path,
    *,
    load: Callable[[Path], dict[str, Tensor]] = load_tensors,
    read: Callable[[Path], tuple[dict[str, Any], bool]] | None = None,
) -> Checkpoint:
    """Load a checkpoint after checking every file against the manifest.

    Args:
        folder: the folder of the checkpoint.
        load: the function that reads the named tensors of a safetensors file.
        read: the function that checks the files and returns the state, and True if there is an average. None means
            `read_checked_state`.

    Raises:
        InputError: the checkpoint is damaged, or its format is not supported.
    """
    state, has_average = (read or read_checked_state)(folder)
    files = [folder / WEIGHTS, *([folder / AVERAGED_WEIGHTS] if has_average else [])]
    weights = [load(file) for file in files]
    for tensors, file in zip(weights, files, strict=True):
        refuse_dtypes(tensors, file)
    return Checkpoint(
        step=state.pop("step"),
        weights=weights[0],
        optimizer=_join_optimizer(state.pop("optimizer"), load(folder / OPTIMIZER)),
        ema=weights[1] if len(weights) > 1 else None,
        state=state,
    )


def read_checked_state(folder: Path) -> tuple[dict[str, Any], bool]:
    """Check every file of a checkpoint, and return its state, and True if it has an average of the weights.

    Raises:
        InputError: the checkpoint is damaged, or its format is not supported.
    """
    damage = checkpoint_damage(folder)
    if damage is not None:
        raise InputError(damage)
    state = read_state(folder)
    for name in FORMAT.header():
        del state[name]
    return state, (folder / AVERAGED_WEIGHTS).exists()


@contextlib.contextmanager
def convert_foreign_errors(folder: Path) -> Iterator[None]:
    """Convert errors that libraries raise on a foreign or altered checkpoint to `InputError`."""
    try:
        yield
    except (InputError, RunFailure):
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{folder} was written by a different model or optimizer, or was altered: {reason}") from error


class _OptimizerState(BaseModel):
    state: dict[Annotated[str, StringConstraints(pattern="^[0-9]{1,9}$")], dict[str, Any]]
    param_groups: list[dict[str, Any]]


class _AutomaticChoices(BaseModel):
    __pydantic_extra__: dict[str, str | int | float | bool | None] = Field(init=False)
    model_config = ConfigDict(extra="allow")

    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)] | None = None
    precision: Literal["fp32", "bf16"] | None = None
    planned_steps: int | None = None


class _CheckpointState(BaseModel):
    step: Annotated[int, Field(ge=0, lt=2**63)]
    optimizer: _OptimizerState
    choices: _AutomaticChoices = _AutomaticChoices()
    tally: Tally = Tally()


def read_state(folder: Path) -> dict[str, Any]:
    """Read the JSON values of a checkpoint: fields of `Checkpoint` and the state of the training loop.

    Raises:
        InputError: the file cannot be read, its format is not supported, or a required value is missing or has a wrong
            type.
    """
    state = read_json_object(folder / STATE, what="the state of a run")
    FORMAT.check(state, folder)
    convert_json(state, _CheckpointState, name=str(folder / STATE))
    return state


def checkpoint_damage(folder: Path) -> str | None:
    """Return a message about the damage of a checkpoint; None if training can resume from it."""
    return _find_damage(folder, (WEIGHTS, OPTIMIZER, STATE), read=None)


def weights_damage(folder: Path) -> str | None:
    """Return a message about damaged validated weights in the folder of a checkpoint; None if they are intact."""
    return _find_damage(folder, (WEIGHTS,), read=(find_validated_weights(folder).name,))


def _find_damage(folder: Path, needed: Collection[str], *, read: Collection[str] | None) -> str | None:
    # The manifest must list an average: a foreign file of this name would be taken for one.
    present = [path for path in (folder / AVERAGED_WEIGHTS,) if path.exists()]
    return manifest_damage(folder, needed=needed, read=read, name=folder.name, present=present)


def find_validated_weights(folder: Path) -> Path:
    """Return the file of a checkpoint's validated weights: the exponential average if there is one."""
    average = folder / AVERAGED_WEIGHTS
    return average if average.exists() else folder / WEIGHTS


def find_newest_undamaged(
    run: Path, damage_of: Callable[[Path], str | None] = checkpoint_damage
) -> tuple[Path | None, list[str]]:
    """Find the newest undamaged checkpoint.

    Args:
        run: the run directory.
        damage_of: the function that checks a checkpoint, such as `weights_damage`, which checks the weights only.

    Returns:
        The folder or None, and one message for each newer damaged checkpoint.
    """
    skipped: list[str] = []
    for step in reversed(checkpoint_steps(run)):
        folder = checkpoint_folder(run, step)
        damage = damage_of(folder)
        if damage is None:
            return folder, skipped
        # A checkpoint that training has just deleted is not damaged.
        if folder.exists():
            skipped.append(damage)
    return None, skipped


def read_choices(run: Path) -> dict[str, Any] | None:
    """Return the automatic choices of a run, such as its precision; None if there is no undamaged checkpoint.

    A resumed run uses these choices instead of choosing again.
    """
    folder, _ = find_newest_undamaged(run)
    if folder is None:
        return None
    choices: dict[str, Any] = read_state(folder).get("choices", {})
    return choices


def prune_checkpoints(run: Path, *, newest: int, keep: int, best: int | None, resumed_best: int | None = None) -> None:
    """Delete the checkpoints up to `newest`, except the last `keep` and the best ones.

    Args:
        run: the run directory.
        newest: the step just saved; later, damaged checkpoints are neither counted nor deleted.
        keep: the number of checkpoints to keep, at least 1.
        best: the step of the best checkpoint. None means that there is none.
        resumed_best: the best step in the checkpoint `newest`, for a resumed run. None means that there is none.
    """
    past = [step for step in checkpoint_steps(run) if step <= newest]
    for step in past[:-keep]:
        if step not in (best, resumed_best):
            remove_folder(checkpoint_folder(run, step))


def write_best(run: Path, step: int) -> None:
    """Write the step of the best checkpoint to the file `best`."""
    write_text(run / "best", f"step-{step}\n")


def read_best(run: Path) -> int | None:
    """Return the step that the file `best` names; None if there is no file or no step in it."""
    if not (run / "best").exists():
        return None
    match = _STEP_NAME.fullmatch(read_model_text(run / "best", what="the name of a checkpoint").strip())
    return int(match[1]) if match else None


@contextlib.contextmanager
def write_folder(
    folder: Path, *, otherwise: str = "the unfinished folder was removed", unlisted: Collection[str] = ()
) -> Iterator[Path]:
    """Yield a temporary folder to fill; on success it gets a manifest, is synced and renamed to `folder`.

    Args:
        folder: the folder to write.
        otherwise: the end of the error message, about the state after a failure.
        unlisted: the names of files that may be changed or missing; the manifest leaves them out.

    Raises:
        RunFailure: the disk is full or refuses the write; the temporary folder is removed, an earlier `folder` stays.
    """
    temporary = temporary_path(folder)
    remove_folder(temporary)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_dir():
                sync(path)
        seal(
            temporary,
            folder.name,
            (path for path in temporary.rglob("*") if path.is_file() and path.name not in unlisted),
        )
        _put_in_place(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise RunFailure(f"{folder} could not be saved: {_describe_error(error)}; {otherwise}") from error
    finally:
        remove_folder(temporary)


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically.

    Raises:
        RunFailure: the disk is full or refuses the write; an earlier file stays.
    """
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise RunFailure(f"{path} could not be saved: {_describe_error(error)}") from error


def link_weights(run: Path, step: int, folder: Path) -> None:
    """Link or copy the validated weights of a checkpoint to a folder that stays after the checkpoint is deleted.

    Raises:
        RunFailure: the disk is full or refuses the write.
    """
    source = find_validated_weights(checkpoint_folder(run, step))
    with write_folder(folder, otherwise=UNTOUCHED) as temporary:
        try:
            # A hard link takes no space while the checkpoint exists.
            os.link(source, temporary / WEIGHTS)
        except OSError:
            shutil.copyfile(source, temporary / WEIGHTS)


def find_undamaged_weights(*parents: Path) -> dict[int, Path]:
    """Return the files with undamaged validated weights by step, in ascending order.

    Args:
        parents: the folders of a run with checkpoints, or with weights alone; a later folder takes precedence.
    """
    folders = [(step, parent / f"step-{step}") for parent in parents for step in steps_in(parent)]
    undamaged = {step: find_validated_weights(folder) for step, folder in folders if weights_damage(folder) is None}
    return dict(sorted(undamaged.items()))


def clear_leftovers(run: Path) -> None:
    """Remove the temporary files of a killed process; the run directory must be locked."""
    for folder in (run, run / "plots", run / "checkpoints", recent_folder(run), snapshots_folder(run)):
        for entry in list(folder.iterdir()) if folder.is_dir() else []:
            replaced = re.fullmatch(r"\.(.+)\.replaced", entry.name)
            if replaced and not (folder / replaced[1]).exists():
                # Killed between the two renames of a replacement: the earlier folder is still valid.
                entry.rename(folder / replaced[1])
            elif replaced or TEMPORARY.fullmatch(entry.name) or re.fullmatch(r"\..+\.removing", entry.name):
                remove(entry)


def remove_folder(folder: Path) -> None:
    """Delete a folder, if it exists."""
    doomed = folder.with_name(f".{folder.name.lstrip('.')}.removing")
    try:
        # Rename first: a process that is killed must not leave a part of a checkpoint under a valid name.
        folder.rename(doomed)
    except OSError:
        doomed = folder
    shutil.rmtree(doomed, ignore_errors=True)


def _split_optimizer(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split an optimizer's state dict into JSON values and tensors, which get names such as "3.exp_avg"."""
    values: dict[int, dict[str, Any]] = {}
    tensors: dict[str, Tensor] = {}
    for index, parameter in state["state"].items():
        values[index] = {name: value for name, value in parameter.items() if not isinstance(value, Tensor)}
        tensors |= {f"{index}.{name}": value for name, value in parameter.items() if isinstance(value, Tensor)}
    # On CUDA, the learning rate is a tensor.
    groups = [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in state["param_groups"]
    ]
    return {"state": values, "param_groups": groups}, tensors


def _join_optimizer(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Reverse `_split_optimizer`, and restore the integer keys and tuples that JSON lacks."""
    state = {int(index): dict(parameter) for index, parameter in values["state"].items()}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        if index not in values["state"]:
            raise InputError(f"{STATE} has no parameter for the optimizer's tensor '{name}'")
        state[int(index)][key] = tensor
    groups = [
        {key: tuple(value) if isinstance(value, list) and key != "params" else value for key, value in group.items()}
        for group in values["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _put_in_place(temporary: Path, folder: Path) -> None:
    earlier = folder.with_name(f".{folder.name}.replaced")
    if folder.exists():
        remove_folder(earlier)
        folder.rename(earlier)
    temporary.rename(folder)
    sync(folder.parent)
    remove_folder(earlier)


def _describe_error(error: OSError | SafetensorError) -> str:
    """Return the cause of an error in words; safetensors has the system's error number in its message only."""
    match = _OS_ERROR_NUMBER.search(str(error))
    number = int(match[1]) if match else None
    if isinstance(error, OSError):
        number = error.errno
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full"
    return os.strerror(number) if number is not None else str(error)
