"""Checks that all processes train the same run on the same data, and the choice of their training engine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from clearhead.base.errors import InputError
from clearhead.base.files import open_model_file
from clearhead.base.temporary_files import temporary_path
from clearhead.checkpoints.runs.checkpoint import checkpoint_steps
from clearhead.checkpoints.runs.directory import differing_keys, flatten_keys, list_files_to_seal
from clearhead.core import build
from clearhead.data.batches.base import Batches, Loss
from clearhead.fast.stored import StorageFormat
from clearhead.spec import Model
from clearhead.training.parallel.engines import RankBatch, ReplicatedEngine, TrainingEngine, take_rank_rows
from clearhead.training.parallel.processes import Processes
from clearhead.training.parallel.world import Process
from clearhead.training.preflight import Workload, free_for_each, least_memory
from clearhead.training.runfile.sections import RunFile
from clearhead.training.task_setup import PreparedTask
from clearhead.version import __version__


def check_same_everywhere(processes: Processes, run_file: RunFile) -> None:
    """Refuse processes that were started with different run files, overrides or versions.

    Raises:
        InputError: a process differs from the first.
    """
    tables = processes.all_gather({"clearhead": __version__, **run_file.model_dump(mode="json")})
    for rank, table in enumerate(tables):
        keys = differing_keys(tables[0], table)
        if keys:
            first, other = flatten_keys(tables[0]).get(keys[0], "not set"), flatten_keys(table).get(keys[0], "not set")
            raise InputError(
                f"process {rank} was started with another run file than process 0: {keys[0]} is {other!r} in process "
                f"{rank} and {first!r} in process 0; start all of them with the same file and the same changes"
            )


def check_first_has_run(processes: Processes, run: Path) -> None:
    """Refuse to resume if the first process has no checkpoint, but a process on another machine has one.

    Raises:
        InputError: only another process has a checkpoint; torchrun may have numbered the machines in another order.
    """
    has_checkpoint = processes.all_gather(bool(checkpoint_steps(run)))
    if any(has_checkpoint) and not has_checkpoint[0]:
        raise InputError(
            f"process 0 has no checkpoint in {run}, but process {has_checkpoint.index(True)} has. Copy the run "
            "directory to the machine of process 0, or make the other machine the first one (torchrun --node-rank 0)"
        )


_SEEN_SECONDS: Final = 5.0
"""Maximum time in seconds to look for a file of another machine: network file systems may be slow."""


def find_ranks_without_folder(processes: Processes, run: Path) -> list[int]:
    """Return the ranks of the processes that do not see the run directory of the first process.

    A folder with the same name may be on another disk. Therefore the first process writes a file with a random name
    into the run directory, and all others look for it.
    """
    name = processes.broadcast(temporary_path(run / processes.attempt).name if processes.is_first else "")
    if processes.is_first:
        (run / name).touch()
    processes.broadcast(None)  # the others start to look after the first process has written
    end = time.monotonic() + _SEEN_SECONDS
    while not (is_seen := (run / name).exists()) and time.monotonic() < end:
        time.sleep(_SEEN_SECONDS / 50)
    missing = [rank for rank, is_seen in enumerate(processes.all_gather(is_seen)) if not is_seen]
    if processes.is_first:
        (run / name).unlink()
    return missing


@contextlib.contextmanager
def copy_description(processes: Processes, run: Path) -> Iterator[Path]:
    """Yield a temporary copy of the files that describe the model of a run, for machines without the run directory.

    Args:
        processes: the processes that train together.
        run: the run directory of the first process.
    """
    paths = list_files_to_seal(run) if processes.is_first else []
    contents = dict[str, bytes]()
    for path in paths:
        with open_model_file(path, what="a file of the run") as file:
            contents[path.relative_to(run).as_posix()] = file.read()
    contents = processes.broadcast(contents)
    with tempfile.TemporaryDirectory() as name:
        for relative, content in contents.items():
            Path(name, relative).parent.mkdir(parents=True, exist_ok=True)
            Path(name, relative).write_bytes(content)
        yield Path(name)


def refuse_sharing(ranks: Sequence[int], run: Path) -> None:
    """Refuse to shard a model if a process does not see the run directory.

    Args:
        ranks: the ranks of the processes that do not see the run directory.
        run: the run directory.

    Raises:
        InputError: there is such a process.
    """
    if ranks:
        raise InputError(
            f"process {ranks[0]} does not see the run directory {run} of process 0, but each process writes its shards "
            "of a shared model (fsdp) there: name a folder that all machines share (train.run=...), or let each "
            "process hold the whole model (train.parallel=ddp)"
        )


def check_same_data(processes: Processes, parts: PreparedTask[Any]) -> None:
    """Refuse processes that have different data, tokenizers or models.

    Raises:
        InputError: a process differs from the first.
    """
    facts = {
        "training data": _digest(parts.batches.state()),
        "validation data": parts.valid_data,
        "tokenizer": parts.tokenizers.fingerprint,
        "model": _digest(parts.spec.to_json()),
    }
    everywhere = processes.all_gather(facts)
    for rank, other in enumerate(everywhere):
        different = [name for name, value in everywhere[0].items() if other[name] != value]
        if different:
            raise InputError(
                f"process {rank} has another {different[0]} than process 0: give every machine the same files, best in "
                "one folder that all of them see"
            )


def check_divisible(parts: PreparedTask[Any], batch_tokens: int, size: int) -> None:
    """Refuse batches that cannot be divided among the processes.

    Args:
        parts: the prepared task.
        batch_tokens: the budget of a batch in tokens.
        size: the number of processes.

    Raises:
        InputError: a batch has fewer rows than there are processes, or the loss compares its rows.
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
            f"{size} processes cannot divide them. Raise it to at least {size * longest}, or start at most {rows} "
            "of them"
        )


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def shares_model(
    run_file: RunFile,
    model: Model,
    device: torch.device,
    processes: Processes,
    formats: Mapping[str, StorageFormat] | None = None,
) -> bool:
    """Return whether the model is sharded over the processes (FSDP2); else each process holds all of it (DDP).

    Args:
        run_file: the checked run file; "auto" shards a model whose training does not fit into the memory of one
            process.
        model: the spec of the model.
        device: the device of this process.
        processes: the processes that train together.
        formats: the formats of frozen matrices, same as in `least_memory`.
    """
    parallel = run_file.train.parallel
    if processes.size == 1 or parallel != "auto":
        return processes.size > 1 and parallel == "fsdp"
    module = build(model, device="meta")
    needed = least_memory(module, is_trained_whole=run_file.lora is None, formats=formats)
    return any(processes.all_gather(needed > free_for_each(device, processes.this.local_size)))


def build_engine(
    module: nn.Module,
    loss: Loss[Any],
    processes: Processes,
    *,
    is_sharded: bool,
    device: torch.device,
    precision: str,
) -> TrainingEngine[Any]:
    """Return the training engine of several processes.

    Args:
        module: the module to train; sharding changes it in place.
        loss: a function that returns the summed loss of a batch and the number of its labels.
        processes: the processes that train together.
        is_sharded: True if the module is sharded over the processes.
        device: the device of this process.
        precision: the precision of the computation.
    """
    if not is_sharded:
        return ReplicatedEngine(module, loss, processes)
    # Imported late: PyTorch's engine for sharded tensors is slow to import, and other runs do not need it.
    from clearhead.training.parallel.sharded import ShardedEngine

    return ShardedEngine(module, loss, processes, device=device, precision=precision)


def rank_workload(
    work: Workload[Any], engine: TrainingEngine[Any], batches: Batches[Any], process: Process
) -> Workload[Any]:
    """Return the workload of this process: the workload of the run, but with this process's rows of each batch.

    Args:
        work: the workload of the whole run.
        engine: the engine of this process.
        batches: the batches with the rows of this process.
        process: this process.
    """

    def loss(module: nn.Module, share: RankBatch[Any]) -> Any:
        return engine.loss(share, is_last=True)

    def score_seconds(module: nn.Module) -> float:
        assert work.score_seconds is not None
        with engine.whole_weights():
            return work.score_seconds(module)

    largest = None if work.largest is None else take_rank_rows(work.largest, process)
    return Workload(
        loss=loss,
        batches=batches,
        largest=largest,
        num_sizes=work.num_sizes,
        valid_share=work.valid_share,
        score_seconds=None if work.score_seconds is None else score_seconds,
        reading_seconds=work.reading_seconds,
    )
