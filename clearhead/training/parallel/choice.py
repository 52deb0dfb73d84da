"""Which engine several processes train with, and what each of them then has to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from clearhead.base.printing import num_parameters
from clearhead.core import build
from clearhead.spec import Model
from clearhead.training.dry_run import Workload
from clearhead.training.parallel.engines import Engine, Replicated
from clearhead.training.parallel.processes import Process, Processes
from clearhead.training.parallel.shares import Share, share_of
from clearhead.training.preflight import free_for_each, least_memory
from clearhead.training.protocols import Batches, Loss
from clearhead.training.runfile.sections import RunFile


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
) -> Engine[Any] | None:
    """Return the engine of several processes; None for one.

    Args:
        module: the module to train; it is changed where the processes share it.
        loss: gives, for a batch, the summed loss and the number of labels.
        processes: that train.
        is_sharded: whether they share the module.
        device: of this process.
        precision: of the computation.
    """
    if processes.size == 1:
        return None
    if not is_sharded:
        return Replicated(module, loss, processes.size)
    # Only now: it loads PyTorch's engine for sharded tensors, for which other runs should not wait.
    from clearhead.training.parallel.sharded import Sharded

    return Sharded(module, loss, processes, device=device, precision=precision)


def work_of_one(work: Workload[Any], engine: Engine[Any], batches: Batches[Any], process: Process) -> Workload[Any]:
    """Return what one of several processes computes.

    Args:
        work: of the whole run.
        engine: that computes it.
        batches: the shares of this process.
        process: this one.
    """

    def loss(module: nn.Module, share: Share[Any]) -> Any:
        return engine.loss(share, is_last=True)

    def score_seconds(module: nn.Module) -> float:
        assert work.score_seconds is not None
        with engine.whole_weights():
            return work.score_seconds(module)

    largest = None if work.largest is None else share_of(work.largest, process)
    return replace(
        work,
        loss=loss,
        batches=batches,
        largest=largest,
        score_seconds=None if work.score_seconds is None else score_seconds,
    )
