"""How the processes of a training find each other, and how they end: one of them says why, the others are quiet."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from clearhead.base.errors import InputError, RunFailure
from clearhead.base.machine import choose_device
from clearhead.checkpoints.runs.checkpoint import checkpoint_steps
from clearhead.training.parallel.processes import Group, Process, Processes, Quiet, is_first_to_fail

ARRIVAL_SECONDS: Final = 300.0
"""So long the processes wait for each other at the start."""
PATIENCE: Final = timedelta(minutes=30)
"""So long a process waits for the others in a step; a checkpoint and a plot are written in this time."""

_POLL_SECONDS = 0.05
# What gloo and NCCL say where another process is gone.
_SIGNS = ("gloo", "nccl", "connection", "timed out", "socket")
_trainings = itertools.count()


def own_device(name: str, process: Process) -> torch.device:
    """Return the device of this process: on a machine with GPUs each has its own.

    Args:
        name: as in the run file.
        process: this one.

    Raises:
        InputError: the machine does not have it, or fewer GPUs than processes.
    """
    device = choose_device(name)
    if process.size == 1 or device.type != "cuda":
        return device
    if ":" in name:
        raise InputError(f"train.device is '{name}', but each of several processes takes a GPU of its own: name 'cuda'")
    count = torch.cuda.device_count()
    if process.local_size > count:
        raise InputError(
            f"torchrun started {process.local_size} processes on a machine with {count} GPUs: start {count} with "
            f"--nproc-per-node {count}, or train on the CPU with train.device=cpu"
        )
    torch.cuda.set_device(process.local_rank)
    return torch.device("cuda", process.local_rank)


@contextlib.contextmanager
def joined(process: Process, run: Path, *, device: str) -> Iterator[Processes]:
    """Join the other processes for the length of a with block; alone there is nobody to join.

    Whatever ends the block ends all processes: the first that fails raises its error, and the others `Quiet`.

    Args:
        process: this one.
        run: the run directory, for the message about a process that is gone.
        device: as in the run file.

    Raises:
        InputError: the device cannot be used.
        RunFailure: a process did not arrive, or is gone.
        Quiet: another process says what happened.
    """
    if process.size == 1:
        yield Processes()
        return
    store: Store | None = None
    try:
        store = _meeting_point(process)
        _arrive(store, process)
        backend = "cpu:gloo,cuda:nccl" if own_device(device, process).type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=process.rank, world_size=process.size, timeout=PATIENCE)
        yield Group(process, store)
        dist.destroy_process_group()
    except BaseException as error:
        raise _spoken(error, store, process, run) from error
    finally:
        # NCCL would wait here for a process that is gone.
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()


def _meeting_point(process: Process) -> Store:
    """Return the store that torchrun or the first process keeps, with a part for each training of this process."""
    # Where torchrun keeps the store, the number of restarts keeps an attempt apart from those before it.
    prefix = f"clearhead {process.restarts} {next(_trainings)}"
    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=ARRIVAL_SECONDS))))
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        raise RunFailure(
            f"Process {process.rank} of {process.size} did not reach the others at {where} within "
            f"{ARRIVAL_SECONDS:.0f} s: start it with torchrun, and on several machines give each the same "
            "--rdzv-endpoint"
        ) from error
    return PrefixStore(prefix, store)


def _arrive(store: Store, process: Process) -> None:
    """Wait until all processes are there."""
    store.set(f"rank {process.rank}", "")
    waiting = list(range(process.size))
    end = time.monotonic() + ARRIVAL_SECONDS
    while waiting := [rank for rank in waiting if not store.check([f"rank {rank}"])]:
        if time.monotonic() > end:
            ranks = ", ".join(map(str, waiting))
            raise RunFailure(
                f"Of {process.size} processes {len(waiting)} did not arrive within {ARRIVAL_SECONDS:.0f} s (rank "
                f"{ranks}): see what they say, and whether torchrun runs on every machine with the same --nnodes"
            )
        time.sleep(_POLL_SECONDS)


def _spoken(error: BaseException, store: Store | None, process: Process, run: Path) -> BaseException:
    """Return what this process raises: its error, or `Quiet` where another process has told of its own."""
    told = _lost(run) if _tells_of_a_loss(error) else error
    try:
        is_first = process.local_rank == 0 if store is None else is_first_to_fail(store)
    except RuntimeError:  # the machine that kept the store is gone
        is_first = process.local_rank == 0
    return told if is_first else Quiet(_exit_code(told))


def _exit_code(error: BaseException) -> int:
    if isinstance(error, InputError):
        return 2
    code = getattr(error, "exit_code", getattr(error, "code", 1))
    return code if isinstance(code, int) else 1


def _tells_of_a_loss(error: BaseException) -> bool:
    """Return whether an error of a library comes from a process that is gone."""
    if isinstance(error, RunFailure) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in _SIGNS)


def _lost(run: Path) -> RunFailure:
    steps = checkpoint_steps(run)
    rest = (
        f"nothing but the steps after step {steps[-1]} is lost, and the same command with --resume goes on from there"
        if steps
        else "no step was saved, so start the same command again"
    )
    return RunFailure(f"Another process of this training was killed or broke down, so all of them stop; {rest}.")
