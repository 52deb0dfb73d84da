"""The processes of one training: how they meet, what they exchange, and how they end."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from clearhead.base.errors import InputError, RunFailure
from clearhead.base.machine import choose_device
from clearhead.checkpoints.runs.checkpoint import checkpoint_steps

T = TypeVar("T")

_POLL_SECONDS = 0.05
_FAILED = "failed"


@dataclass(frozen=True)
class Process:
    """This process among all that torchrun started; by itself it is the only one.

    Args:
        rank: its number, from 0.
        size: how many there are, on all machines.
        local_rank: its number on its machine.
        local_size: how many there are on its machine.
        machine: the number of its machine.
        restarts: how often torchrun started all of them anew.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    machine: int = 0
    restarts: int = 0

    @classmethod
    def here(cls) -> Process:
        """Return this process as torchrun describes it in its environment."""
        rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
        local_size = _number("LOCAL_WORLD_SIZE", size)
        return cls(
            rank=rank,
            size=size,
            local_rank=_number("LOCAL_RANK", rank),
            local_size=local_size,
            machine=_number("GROUP_RANK", rank // max(1, local_size)),
            restarts=_number("TORCHELASTIC_RESTART_COUNT", 0),
        )


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else otherwise


class Quiet(SystemExit):
    """Ends a process without a word, because another one of the same training says what happened."""


class Processes:
    """One process alone: nobody else is there to tell or to wait for.

    Args:
        process: this one.
    """

    def __init__(self, process: Process = Process()) -> None:
        self.this = process

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run and talks to the user."""
        return self.this.rank == 0

    @property
    def size(self) -> int:
        """How many there are."""
        return self.this.size

    def first_of(self, value: T) -> T:
        """Return the value that the first process gives."""
        return value

    def all_of(self, value: T) -> list[T]:
        """Return the values that all processes give, by rank."""
        return [value]

    def rows_of(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows that all processes give, by rank; all of one length."""
        return [list(row)]

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let the first process of each machine go first, so that the others find in the cache what it made."""
        yield


class Group(Processes):
    """Several processes that have joined.

    Args:
        process: this one.
        store: what all of them can reach.
    """

    def __init__(self, process: Process, store: Store) -> None:
        super().__init__(process)
        self._store = store
        self._turns = 0

    def first_of(self, value: T) -> T:
        """Return the value that the first process gives."""
        given: list[T] = [value]
        dist.broadcast_object_list(given, src=0)
        return given[0]

    def all_of(self, value: T) -> list[T]:
        """Return the values that all processes give, by rank."""
        given: list[T] = [value] * self.size
        dist.all_gather_object(given, value)
        return given

    def rows_of(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows that all processes give, by rank; all of one length."""
        # On the CPU also where the model is on a GPU, which then need not wait for it.
        row_tensor = torch.tensor(list(row), dtype=torch.float64)
        rows = [torch.empty_like(row_tensor) for _ in range(self.size)]
        dist.all_gather(rows, row_tensor)
        return [given.tolist() for given in rows]

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let the first process of each machine go first, so that the others find in the cache what it made."""
        self._turns += 1
        done = f"turn {self._turns} of machine {self.this.machine}"
        # Looked up again and again: a wait inside the store would neither see a failure nor let a signal through.
        while self.this.local_rank and not self._store.check([done]):
            if self._store.check([_FAILED]):
                raise Quiet(1)
            time.sleep(_POLL_SECONDS)
        yield
        if not self.this.local_rank:
            self._store.set(done, "")


def is_first_to_fail(store: Store) -> bool:
    """Return whether no other process has failed before; the one that is first tells the user."""
    return bool(store.add(_FAILED, 1) == 1)


ARRIVAL_SECONDS: Final = 300.0
"""So long the processes wait for each other at the start."""
PATIENCE: Final = timedelta(minutes=30)
"""So long a process waits for the others in a step; a checkpoint and a plot are written in this time."""

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
def join_processes(process: Process, run: Path, *, device: str) -> Iterator[Processes]:
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
