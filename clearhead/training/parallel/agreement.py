"""What must be the same on every process before the first step: run file, data, tokenizer and model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from clearhead.base.errors import InputError
from clearhead.checkpoints.runs.directory import differing_keys, dotted
from clearhead.training.parallel.processes import Processes
from clearhead.training.runfile.sections import RunFile
from clearhead.training.task_parts import TaskParts
from clearhead.version import __version__


def check_same_everywhere(processes: Processes, run_file: RunFile) -> None:
    """Refuse processes that were started with other run files, overrides or versions.

    Raises:
        InputError: one differs from the first.
    """
    tables = processes.all_of({"clearhead": __version__, **run_file.model_dump(mode="json")})
    for rank, table in enumerate(tables):
        keys = differing_keys(tables[0], table)
        if keys:
            first, other = dotted(tables[0]).get(keys[0], "not set"), dotted(table).get(keys[0], "not set")
            raise InputError(
                f"process {rank} was started with another run file than process 0: {keys[0]} is {other!r} there and "
                f"{first!r} here; start all of them with the same file and the same changes"
            )


def check_run_is_seen(processes: Processes, run: Path) -> None:
    """Refuse machines that do not see the run directory, after a message of the process that made it.

    Raises:
        InputError: one does not see what the first process made.
    """
    blind = [rank for rank, is_seen in enumerate(processes.all_of(run.is_dir())) if not is_seen]
    if blind:
        raise InputError(
            f"process {blind[0]} does not see the run directory {run}, which process 0 made: name a folder that all "
            "machines share (train.run=...)"
        )


def check_same_data(processes: Processes, parts: TaskParts[Any]) -> None:
    """Refuse processes that read other data, or made another tokenizer or model of it.

    Raises:
        InputError: one differs from the first.
    """
    facts = {
        "training data": _digest(parts.batches.state()),
        "validation data": parts.valid_data,
        "tokenizer": parts.tokenizers.fingerprint,
        "model": _digest(parts.spec.to_json()),
    }
    everywhere = processes.all_of(facts)
    for rank, other in enumerate(everywhere):
        different = [name for name, value in everywhere[0].items() if other[name] != value]
        if different:
            raise InputError(
                f"process {rank} has another {different[0]} than process 0: give every machine the same files, best in "
                "one folder that all of them see"
            )


def check_divisible(parts: TaskParts[Any], batch_tokens: int, size: int) -> None:
    """Refuse batches that cannot be divided among the processes.

    Args:
        parts: of the task.
        batch_tokens: the budget of a batch.
        size: how many processes there are.

    Raises:
        InputError: a batch has fewer rows than there are processes, or its rows belong together.
    """
    if parts.compares_rows:
        raise InputError(
            f"the task '{parts.record.kind}' compares every pair of a batch with all others, so it trains in one "
            "process: start it without torchrun"
        )
    longest = max(side.longest for side in parts.sides)
    rows = batch_tokens // longest
    if rows < size:
        raise InputError(
            f"train.batch_tokens is {batch_tokens}, which is {rows} row{'s' * (rows != 1)} of {longest} tokens, and "
            f"{size} processes cannot divide them: raise it to at least {size * longest}, or start at most {rows} "
            "of them"
        )


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
