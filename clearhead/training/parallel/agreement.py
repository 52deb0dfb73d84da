"""Decisions of several processes before the first step: the same run everywhere, and the engine they train with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clearhead.base.errors import InputError
from clearhead.base.printing import num_parameters
from clearhead.checkpoints.runs.directory import differing_keys, dotted
from clearhead.core import build
from clearhead.data.batches.base import Batches, Loss
from clearhead.spec import Model
from clearhead.training.parallel.engines import Engine, Replicated, Share, share_of
from clearhead.training.parallel.processes import Process, Processes
from clearhead.training.preflight import Workload, free_for_each, least_memory
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


def shares_model(run_file: RunFile, model: Model, device: torch.device, processes: Processes) -> bool:
    """Return whether the processes share one model (FSDP2); else each holds all of it (DDP).

    Args:
        run_file: the checked run file; "auto" shares a model that does not fit into the memory of one process.
        model: its spec.
        device: of this process.
        processes: that train.
    """
    parallel = run_file.train.parallel
    if processes.size == 1 or parallel != "auto":
        return processes.size > 1 and parallel == "fsdp"
    count = num_parameters(build(model, device="meta"))
    needed = least_memory(count, is_trained_whole=run_file.lora is None)
    return any(processes.all_of(needed > free_for_each(device, processes.this.local_size)))


def build_engine(
    module: nn.Module,
    loss: Loss[Any],
    processes: Processes,
    *,
    is_sharded: bool,
    device: torch.device,
    precision: str,
) -> Engine[Any]:
    """Return the engine of several processes.

    Args:
        module: the module to train; it is changed where the processes share it.
        loss: gives, for a batch, the summed loss and the number of labels.
        processes: that train.
        is_sharded: whether they share the module.
        device: of this process.
        precision: of the computation.
    """
    if not is_sharded:
        return Replicated(module, loss, processes.size)
    # Only now: it loads PyTorch's engine for sharded tensors, for which other runs should not wait.
    from clearhead.training.parallel.sharded import Sharded

    return Sharded(module, loss, processes, device=device, precision=precision)


def work_of_one(work: Workload[Any], engine: Engine[Any], batches: Batches[Any], process: Process) -> Workload[Any]:
    """Return the workload of one of several processes.

    Args:
        work: the workload of the whole run.
        engine: the engine of this process.
        batches: the shares of this process.
        process: this process.
    """

    def loss(module: nn.Module, share: Share[Any]) -> Any:
        return engine.loss(share, is_last=True)

    def score_seconds(module: nn.Module) -> float:
        assert work.score_seconds is not None
        with engine.whole_weights():
            return work.score_seconds(module)

    largest = None if work.largest is None else share_of(work.largest, process)
    return Workload(
        loss=loss,
        batches=batches,
        largest=largest,
        num_sizes=work.num_sizes,
        valid_share=work.valid_share,
        score_seconds=None if work.score_seconds is None else score_seconds,
        reading_seconds=work.reading_seconds,
    )
