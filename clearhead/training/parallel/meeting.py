"""Rendezvous of the processes of a training: a common store, a random word for each attempt, and reported faults.

An attempt is one start of all processes; torchrun starts them again after a failure. It counts restarts on each machine
separately, so these counts cannot identify an attempt. Instead the first process draws a random word for each attempt,
and all others read it.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined] # its stubs export nothing
from torch.distributed.distributed_c10d import PrefixStore, Store

from clearhead.base.errors import InputError, RunFailure
from clearhead.training.parallel.world import FailedElsewhere, Process

ARRIVAL_SECONDS: Final = 300.0
"""Maximum time in seconds that processes wait for each other at the start."""
NOTICE_SECONDS: Final = 10.0
"""Time in seconds after which a process names those it waits for; also the wait of a process with wrong input."""
_POLL_SECONDS: Final = 0.05
_ANSWER_SECONDS: Final = 10.0
_WORD: Final = "word"
_FAILED: Final = "failed"
_trainings = itertools.count()


class Meeting:
    """The common store of a job: processes meet there at the start of each attempt, and report wrong input.

    torchrun keeps the store on the machine of the first process, where it outlives every attempt. Without torchrun, the
    first process keeps it.

    Args:
        process: this process.
        notify: a function that shows a message about a long wait.
        seconds: the maximum wait for other processes in seconds. None means `ARRIVAL_SECONDS`.

    Attributes:
        job: a random word that is the same in all attempts of a job.

    Raises:
        InputError: the port is in use.
        RunFailure: no process keeps the store.
    """

    def __init__(self, process: Process, notify: Callable[[str], None], seconds: float | None = None) -> None:
        self._process = process
        self._notify = notify
        self._seconds = ARRIVAL_SECONDS if seconds is None else seconds
        self._fault = f"wrong input {next(_trainings)}"
        self._word = ""
        self._store: Store | None = None
        self._store = self._open()
        self.job: str = self._store.compare_set("job", "", secrets.token_hex(8)).decode()

    def _open(self) -> Store:
        """Return the store as soon as the process that keeps it accepts connections."""
        process, where = self._process, f"{self._process.address}:{self._process.port}"
        keeps = process.rank == 0 and not process.has_agent
        while True:
            if not keeps:
                self._wait(lambda: None if _listens(process) else [0])
            try:
                store: Store = TCPStore(
                    process.address,
                    process.port,
                    is_master=keeps,
                    timeout=timedelta(seconds=_ANSWER_SECONDS),
                    wait_for_workers=False,
                    multi_tenant=True,
                )
            except (RuntimeError, ValueError) as error:
                if _listens(process):
                    raise InputError(
                        f"MASTER_PORT is {process.port}, and another program uses {where}: name a free port"
                    ) from error
                if keeps:
                    raise InputError(
                        f"MASTER_ADDR is '{process.address}', where process 0 cannot listen: name the machine of "
                        "process 0"
                    ) from error
                # The keeper has ended in the meantime: wait for its successor.
            else:
                store.set_timeout(timedelta(seconds=self._seconds))
                return store

    def arrive(self) -> tuple[Store, str]:
        """Wait for all processes; return a store with only the keys of this attempt, and the attempt's random word.

        Raises:
            InputError: another process reported wrong input, in this attempt or in an earlier one.
            RunFailure: a process did not arrive.
        """
        store, process = self._opened, self._process
        if process.rank == 0:
            self._word = word = secrets.token_hex(8)
            store.set(_WORD, word)
            others = range(1, process.size)
            self._wait(lambda: [rank for rank in others if not store.check([f"{word} {rank}"])] or None)
            # Withdrawn before any process continues: a readable word belongs to an attempt that has not begun.
            store.set(_WORD, "")
            store.set(f"{word} begins", "")
        else:
            self._wait(self._look_for_word)
        return PrefixStore(self._word, store), self._word

    def _look_for_word(self) -> list[int] | None:
        """Answer each new word of the first process; return the missing ranks, or None once the attempt begins."""
        store = self._opened
        word = store.get(_WORD).decode() if store.check([_WORD]) else ""
        if word and word != self._word:  # an earlier word belongs to a process that was killed while it waited
            self._word = word
            store.set(f"{word} {self._process.rank}", "")
        if not self._word:
            return [0]
        return None if store.check([f"{self._word} begins"]) else []

    def _wait(self, absent: Callable[[], list[int] | None]) -> None:
        """Wait for other processes; during a long wait, show a message with their ranks.

        Args:
            absent: a function that returns the ranks known to be missing; None ends the wait.
        """
        begun, is_noticed = time.monotonic(), False
        of = f"of {self._process.size} at {self._process.address}:{self._process.port}"
        while (ranks := absent()) is not None:
            if (fault := self.fault()) is not None:
                raise InputError(fault)
            waited, names = time.monotonic() - begun, f"process{'es' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            if waited > NOTICE_SECONDS and ranks and not is_noticed:
                is_noticed = True
                if self._process.local_rank == 0:
                    self._notify(f"process {self._process.rank} waits for {names} {of}")
            if waited > self._seconds:
                raise RunFailure(
                    f"Process {self._process.rank} waited {self._seconds:.0f} s for {names if ranks else 'others'} "
                    f"{of}: read their messages, and check that torchrun runs on every machine with the same --nnodes "
                    "and --rdzv-endpoint"
                )
            time.sleep(_POLL_SECONDS)

    @property
    def _opened(self) -> Store:
        assert self._store is not None, "the common store is not open yet"
        return self._store

    def fault(self) -> str | None:
        """Return the message about wrong input that a process of this job reported in any attempt, or None."""
        if self._store is None or not self._store.check([self._fault]):
            return None
        return self._store.get(self._fault).decode()

    def report(self, error: InputError) -> bool:
        """Report wrong input to all processes and later attempts; return whether this process shows it to the user.

        In the attempt that finds the fault, one process shows it; in later attempts, one process of each machine.
        """
        store, process = self._opened, self._process
        store.compare_set(self._fault, "", str(error))
        is_first = store.add(f"{self._fault} is reported", 1) == 1
        num_times = store.add(f"{self._fault} is known to {process.rank}", 1)
        return is_first or (num_times > 1 and process.local_rank == 0)

    def report_early(self, error: InputError) -> bool:
        """Report wrong input before this process has joined; the process that keeps the store waits for the others."""
        is_told = self.report(error)
        if self._process.rank == 0 and not self._process.has_agent:
            known = [f"{self._fault} is known to {rank}" for rank in range(1, self._process.size)]
            end = time.monotonic() + NOTICE_SECONDS
            while time.monotonic() < end and not self._opened.check(known):
                time.sleep(_POLL_SECONDS)
        return is_told

    def is_first_to_fail(self) -> bool:
        """Return whether this process is the first of its attempt to fail; the first one shows its error."""
        if not self._word:  # no process has arrived
            return self._process.local_rank == 0
        return bool(PrefixStore(self._word, self._opened).add(_FAILED, 1) == 1)


def has_failed(store: Store) -> bool:
    """Return whether a process has failed in the current attempt; `store` is the result of `Meeting.arrive`."""
    return bool(store.check([_FAILED]))


def _listens(process: Process) -> bool:
    """Return whether a program accepts connections at the address of the store."""
    with contextlib.suppress(OSError), socket.create_connection((process.address, process.port), _ANSWER_SECONDS):
        return True
    return False


@contextlib.contextmanager
def reporting_faults(process: Process) -> Iterator[None]:
    """Return a context manager that reports wrong input to the other processes before this process has joined them.

    Args:
        process: this process, one of several.

    Raises:
        InputError: the input is wrong, and no other process has shown the error.
        FailedElsewhere: the input is wrong, and another process has shown the error.
    """
    try:
        yield
    except InputError as error:
        is_told = process.local_rank == 0
        with contextlib.suppress(InputError, RunFailure, RuntimeError):
            is_told = Meeting(process, lambda _: None, NOTICE_SECONDS).report_early(error)
        if is_told:
            raise
        raise FailedElsewhere(2) from error
