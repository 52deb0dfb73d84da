"""The processes of one training: which of them this is, and what they tell each other."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

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
