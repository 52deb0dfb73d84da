"""Run directories: creation, lock and configuration, and the files of the model that a reference selects."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

from filelock import BaseFileLock, FileLock, Timeout

from clearhead.base.commands import make_command, quote
from clearhead.base.errors import InputError, did_you_mean
from clearhead.base.files import (
    MODEL,
    explain_absent,
    read_model_text,
    refuse_absent,
    refuse_link_out,
    refuse_unwritable_place,
    runs_nearby,
)
from clearhead.base.formats import FORMAT_FILE, FileFormat
from clearhead.base.machine import refuse_memory
from clearhead.checkpoints.reference import ORIGIN, SPEC_FILE, ModelReference
from clearhead.checkpoints.runs.checkpoint import (
    AVERAGED,
    checkpoint_steps,
    find_newest_undamaged,
    find_validated_weights,
    read_best,
    snapshots_folder,
    steps_in,
    weights_damage,
    write_text,
)
from clearhead.checkpoints.runs.manifest import MANIFEST, manifest_damage, seal
from clearhead.spec.tasks.record import TaskRecord

RUN_FILE: Final = "run.toml"
TASK_FILE: Final = "task.json"
WEIGHTS_FILE: Final = "weights.safetensors"
LOCK: Final = "lock"
JOB_FILE: Final = "job"
"""File with the random identifier of the torchrun job that began or resumed the run; its restarts recognize the run."""
# Specs of format 1 have `projection_out` in each stack.
RUN_FORMAT: Final = FileFormat("a run directory", 2, "train again", oldest=1)
SAVED_FORMAT: Final = FileFormat("a saved model", 2, "save the model again", oldest=1)
_MOST_READS: Final = 20

T = TypeVar("T")


class RunDirectory:
    """A run directory that this process has locked until it is closed.

    An error inside its `with` block deletes the files of a new run that has no checkpoint yet.

    Args:
        path: the folder.
        lock: the lock that this process holds.
        is_new: True if the folder was missing or empty before.
    """

    def __init__(self, path: Path, lock: BaseFileLock, *, is_new: bool) -> None:
        self.path = path
        self.is_new = is_new
        self._lock = lock

    def write_text(self, name: str, text: str) -> None:
        """Write one small file of the run atomically."""
        write_text(self.path / name, text)

    def seal(self) -> None:
        """Write the manifest of the model's files (spec, task, tokenizers, origin), after all were written."""
        seal(self.path, self.path.name, list_files_to_seal(self.path))

    def close(self) -> None:
        """Release the lock."""
        if self._lock.is_locked:
            # Remove the file while it is locked, so that no lock of another process is removed. Windows refuses to
            # remove an open file; there, releasing the lock removes it.
            with contextlib.suppress(OSError):
                (self.path / LOCK).unlink()
            self._lock.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        nothing_trained = self.is_new and not checkpoint_steps(self.path)
        if error is not None and nothing_trained:
            _empty_folder(self.path)
        self.close()
        if error is not None and nothing_trained:
            with contextlib.suppress(OSError):
                self.path.rmdir()


def open_run(
    path: Path, *, configuration: str | None = None, resume: bool = False, may_differ: Sequence[str] = ()
) -> RunDirectory:
    """Create or reopen a run directory and lock it.

    Args:
        path: the folder.
        configuration: the resolved run file as TOML, which is compared with an existing `run.toml` and then written
            there. None means that the file stays.
        resume: True if the run continues from a checkpoint.
        may_differ: the dotted keys that may change when a run is resumed, such as "train.run".

    Raises:
        InputError: the folder is in use, is not a run directory, cannot be written, contains a link, or contains a run
            with another configuration. Also if it contains a trained run and `resume` is False, or it has no checkpoint
            and `resume` is True.
    """
    _refuse_unsuitable(path, resume=resume)
    is_new = not path.exists() or not any(path.iterdir())
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = acquire_lock(path)
    except OSError as error:
        raise InputError(f"The run directory {path} cannot be written: {error.strerror}") from error
    run = RunDirectory(path, lock, is_new=is_new)
    try:
        if resume and not checkpoint_steps(path):
            raise InputError(
                f"{path} has no checkpoint yet: the run ended before it saved one; start it without --resume"
            )
        if configuration is not None and (resume or _has_trained(path)):
            _refuse_other_configuration(path, configuration, may_differ)
        _refuse_wrong_start(path, resume=resume)
        if resume:
            refuse_altered(path)
        else:
            write_text(path / FORMAT_FILE, RUN_FORMAT.to_json())
        if configuration is not None:
            write_text(path / RUN_FILE, configuration)
    except BaseException as error:
        run.__exit__(type(error), error, None)
        raise
    return run


def read_job(path: Path) -> str:
    """Return the random identifier of the torchrun job that began or resumed a run; "" if there is none."""
    file = path / JOB_FILE
    return read_model_text(file, what="the identifier of a torchrun job") if file.is_file() else ""


@contextlib.contextmanager
def hold_lock(directory: RunDirectory | None, path: Path, *, resume: bool) -> Iterator[Path]:
    """Yield the path of a locked run directory: that of `directory`, or if it is None, `path` after locking it."""
    if directory is not None:
        yield directory.path
        return
    with open_run(path, resume=resume) as run:
        yield run.path


def is_run_directory(path: Path) -> bool:
    """Return whether a folder looks like a run directory of this library."""
    return (path / "checkpoints").is_dir() and ((path / SPEC_FILE).exists() or (path / RUN_FILE).exists())


@dataclass(frozen=True)
class ModelFiles:
    """Files of a run or a saved model that a reference selects.

    Attributes:
        folder: the folder with the spec, the tokenizers and the task record.
        weights: the safetensors file of the selected checkpoint.
    """

    folder: Path
    weights: Path

    @property
    def origin(self) -> Path | None:
        """Folder with the other files of the Hugging Face checkpoint that the model came from, or None."""
        return origin_of(self.folder)


def find_files(reference: ModelReference) -> ModelFiles:
    """Find the files of a trained model in a run directory or the folder of a saved model.

    Raises:
        InputError: the folder holds no usable model; the message says what was expected.
    """
    folder = reference.folder
    refuse_absent(folder, expected=MODEL)
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; expected {MODEL}")
    folder_format = _format_of_folder(folder)
    has_format = (folder / FORMAT_FILE).exists()
    if has_format:
        # Check the format first: another format may have other files.
        folder_format.check_folder(folder)
    if is_run_directory(folder):
        weights = find_weights(reference)
    elif reference.label is not None:
        raise InputError(f"{folder} is a saved model and has no checkpoint '@{reference.label}': leave the label out")
    else:
        weights = folder / WEIGHTS_FILE
    for needed in (folder / SPEC_FILE, weights):
        if not needed.is_file():
            raise missing_file_error(folder, needed.name)
    _refuse_size(weights)
    if not has_format:
        folder_format.check_folder(folder)
    _refuse_damage(folder)
    return ModelFiles(folder, weights)


def find_weights(reference: ModelReference) -> Path:
    """Find the validated weights of a run directory.

    Args:
        reference: a run directory with a label: "best", "last", "averaged" or "step-N". Without a label, the best
            checkpoint is used, or the last one if no step was validated yet.

    Returns:
        The safetensors file: the exponential average if the checkpoint has one.

    Raises:
        InputError: the folder, label or checkpoint does not exist, or the checkpoint is damaged.
    """
    run = reference.folder
    refuse_absent(run, "run directory")
    if not (run / "checkpoints").is_dir():
        raise InputError(f"{run} is not a run directory: it has no checkpoints folder")
    label, has_best, best = reference.label, (run / "best").exists(), read_best(run)
    if label is None:
        label = "best" if has_best else "last"
    match label:
        case "last":
            return _find_last(run)
        case "best" if best is not None:
            return _find_at_step(run, best)
        case "best" if has_best:
            raise InputError(f"{run / 'best'} does not name a checkpoint: restore it, or use {run}@last")
        case "best":
            raise InputError(f"{run} has no best checkpoint yet, because no step was validated: use {run}@last")
        case "averaged":
            return _find_averaged(run)
        case text if re.fullmatch("step-[0-9]{1,18}", text):
            return _find_at_step(run, int(text[5:]))
        case text:
            hint = did_you_mean(text, ["best", "last", "averaged"])
            raise InputError(f"'@{text}' is not a checkpoint of {run}{hint}: use @best, @last, @averaged or @step-N")


def origin_of(folder: Path) -> Path | None:
    """Return the folder with the other files of the checkpoint that a model came from; None if it came from none.

    Raises:
        InputError: the folder is a link out of the folder of the model.
    """
    origin = folder / ORIGIN
    refuse_link_out(origin, folder)
    return origin if origin.is_dir() else None


def missing_file_error(folder: Path, name: str = SPEC_FILE) -> InputError:
    """Return the error about a folder that lacks a file of runs and saved models."""
    lacks = f"{name}, or config.json as in a Hugging Face checkpoint," if name == SPEC_FILE else name
    return InputError(f"{folder} is neither a run directory nor a saved model: {lacks} is missing")


def list_files_to_seal(folder: Path) -> list[Path]:
    """Return the files that a manifest of a run or saved model lists: format, spec, task, tokenizers and origin."""
    paths = [folder / name for name in (FORMAT_FILE, SPEC_FILE, TASK_FILE)]
    paths += [*folder.glob("*tokenizer.json"), *folder.glob("*tokenizer_config.json"), *(folder / ORIGIN).rglob("*")]
    return [path for path in paths if path.is_file()]


def _format_of_folder(folder: Path) -> FileFormat:
    """Return the format of a folder: that of a run directory if it has checkpoints, else that of a saved model."""
    return RUN_FORMAT if (folder / "checkpoints").is_dir() else SAVED_FORMAT


def refuse_altered(folder: Path) -> None:
    """Refuse a run or saved model with an unsupported format, or with files that differ from its manifest.

    Raises:
        InputError: the format is not supported; or there is a manifest, and a file was altered, is missing or was
            added.
    """
    _format_of_folder(folder).check_folder(folder)
    _refuse_damage(folder)


def _refuse_damage(folder: Path) -> None:
    """Refuse a folder whose files differ from its manifest, if it has one."""
    if not (folder / MANIFEST).exists():
        return
    damage = manifest_damage(folder, needed=(SPEC_FILE,), present=list_files_to_seal(folder))
    if damage is not None:
        raise InputError(f"{damage} Restore the file; if you changed it yourself, delete {folder / MANIFEST}.")


def retry_while_checkpoints_change(run: Path, read: Callable[[], T]) -> T:
    """Call a function that reads from a run; call it again if it fails because training replaced checkpoints.

    Args:
        run: the run directory.
        read: the function, which fails if training deletes the checkpoint that it reads.
    """
    for _ in range(_MOST_READS):
        before = _identify_checkpoints(run)
        try:
            return read()
        except (InputError, OSError):
            if _identify_checkpoints(run) == before:
                raise
    return read()


def _identify_checkpoints(run: Path) -> list[tuple[str, int]]:
    """Return names and inodes of the checkpoints, which change if training replaces a checkpoint."""
    identities = []
    for entry in [run / "best", *_list_entries(run / "checkpoints")]:
        with contextlib.suppress(OSError):
            identities.append((entry.name, entry.stat().st_ino))
    return sorted(identities)


def _list_entries(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    return []


def read_task(folder: Path) -> TaskRecord:
    """Read the task record of the model in a folder.

    Raises:
        InputError: the record is missing or not valid.
    """
    file = folder / TASK_FILE
    return TaskRecord.from_json(read_model_text(file, what="a task record"), str(file))


def _find_last(run: Path) -> Path:
    folder, skipped = find_newest_undamaged(run, _find_damage)
    if folder is None:
        reason = f" ({' '.join(skipped)})" if skipped else ""
        raise InputError(f"{run} has no undamaged checkpoint{reason}")
    if skipped:
        warnings.warn(f"{' '.join(skipped)} {folder.name} is used instead", stacklevel=2)
    return find_validated_weights(folder)


def _find_at_step(run: Path, step: int) -> Path:
    parents = [snapshots_folder(run), run / "checkpoints"]
    folders = {step: parent / f"step-{step}" for parent in parents for step in steps_in(parent)}
    if step not in folders:
        available = ", ".join(map(str, sorted(folders))) or "none"
        raise InputError(f"{run} has no checkpoint of step {step}; existing steps: {available}")
    return _require_undamaged(folders[step])


def _find_averaged(run: Path) -> Path:
    folder = run / "checkpoints" / AVERAGED
    if not folder.is_dir():
        average = make_command(f"average {quote(str(run))} --last N")
        raise InputError(f"{run} has no averaged weights yet: create them with: {average}")
    refuse_link_out(folder, run)
    return _require_undamaged(folder)


def _require_undamaged(folder: Path) -> Path:
    if (damage := _find_damage(folder)) is not None:
        raise InputError(damage)
    return find_validated_weights(folder)


def _find_damage(folder: Path) -> str | None:
    """Return a message about damaged weights, before they are loaded; None if they are intact."""
    _refuse_size(find_validated_weights(folder))
    return weights_damage(folder)


def _refuse_size(weights: Path) -> None:
    """Refuse weights that do not fit into memory, before they are hashed: a sparse file may have any size."""
    if weights.is_file():
        refuse_memory(weights.stat().st_size, f"{weights}: to load it")


def differing_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys whose values differ between two nested configurations, sorted."""
    ours, theirs = flatten_keys(before), flatten_keys(now)
    missing = object()
    return sorted(key for key in ours | theirs if ours.get(key, missing) != theirs.get(key, missing))


def flatten_keys(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten_keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _empty_folder(path: Path) -> None:
    for entry in path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != LOCK:
            entry.unlink()


def _refuse_unsuitable(path: Path, *, resume: bool) -> None:
    if path.exists() and not path.is_dir():
        raise InputError(f"The run directory {path} is a file: name a folder")
    if resume and not path.exists():
        raise InputError(
            f"{path}: {explain_absent(path, 'run directory', runs_nearby())}; start the run without --resume"
        )
    known = {RUN_FILE, FORMAT_FILE, LOCK, "checkpoints", "spec.json", "metrics.jsonl", "best", "plots", "data"}
    entries = {entry.name for entry in path.iterdir()} if path.exists() else set()
    if entries and not entries & known:
        raise InputError(f"{path} is not empty and holds no run: name a new folder as the run directory")
    # A run that writes through a link would change files outside its folder.
    for entry in path.rglob("*"):
        if entry.is_symlink():
            raise InputError(
                f"{entry} is a link, and a run writes into its own folder only: replace the link by the file"
            )


def refuse_taken_folder(path: Path) -> None:
    """Refuse a folder in which no new run can begin.

    Raises:
        InputError: the folder contains a trained run or other files, or cannot be written.
    """
    _refuse_unsuitable(path, resume=False)
    refuse_unwritable_place(path)
    if path.exists():
        _refuse_wrong_start(path, resume=False)


def _has_trained(path: Path) -> bool:
    """Return whether a run has a checkpoint after step 0; a run without one may start again."""
    return max(checkpoint_steps(path), default=0) > 0


def _refuse_wrong_start(path: Path, *, resume: bool) -> None:
    steps = checkpoint_steps(path)
    if _has_trained(path) and not resume:
        raise InputError(
            f"{path} already holds a run that reached step {steps[-1]}: add --resume to continue it, "
            "or name another run directory"
        )


def _refuse_other_configuration(path: Path, configuration: str, may_differ: Sequence[str]) -> None:
    run_file = path / RUN_FILE
    if not run_file.exists():
        return
    before, now = read_configuration(run_file), tomllib.loads(configuration)
    keys = [key for key in differing_keys(before, now) if key not in may_differ]
    if keys:
        ours, theirs = flatten_keys(now), flatten_keys(before)
        shown = "; ".join(f"{key} was {_format_value(theirs, key)}, now {_format_value(ours, key)}" for key in keys[:8])
        more = f"; and {len(keys) - 8} more" if len(keys) > 8 else ""
        raise InputError(
            f"{path} holds a run of another configuration ({shown}{more}): restore these values, "
            "or name another run directory"
        )


def read_configuration(path: Path) -> dict[str, Any]:
    """Read the run file of a run directory, without validation.

    Raises:
        InputError: the file is missing or is not TOML.
    """
    text = read_model_text(path, what="a run file")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, and deep tables
        raise InputError(
            f"{path} is not a valid run file ({error}): restore it, or name another run directory"
        ) from None


def _format_value(flat: Mapping[str, Any], key: str) -> str:
    return json.dumps(flat[key], default=str) if key in flat else "not set"


def acquire_lock(path: Path) -> BaseFileLock:
    """Lock a folder by its lock file; the operating system releases the lock of a process that dies.

    Raises:
        InputError: another process has locked the folder.
    """
    file = path / LOCK
    lock = FileLock(file, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        holder = ""
        with contextlib.suppress(OSError):
            holder = file.read_text(encoding="utf-8", errors="replace").strip()
        raise InputError(
            f"The run directory {path} is in use by {holder or 'another process'}: wait for it, or name another folder"
        ) from None
    # The text is for the message above. Windows does not allow reading or writing a locked file.
    with contextlib.suppress(OSError):
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
    return lock
