"""Processes of one training: joining, exchanging values, and ending together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from clearhead.base.errors import InputError, RunFailure
from clearhead.base.machine import choose_device
from clearhead.checkpoints.runs.checkpoint import checkpoint_steps
from clearhead.training.parallel.meeting import Meeting, has_failed
from clearhead.training.parallel.world import ALONE, FailedElsewhere, Process

T = TypeVar("T")

_POLL_SECONDS = 0.05


class Processes:
    """The processes of a training; this base class is a process that trains alone.

    Args:
        process: this process.
        job: a random word that is the same in all attempts of a job; "" without torchrun.

    Attributes:
        attempt: the random word of this attempt (start of all processes); "" for a process alone.
    """

    attempt: str = ""

    def __init__(self, process: Process = ALONE, job: str = "") -> None:
        self.this = process
        self.job = job

    @property
    def is_first(self) -> bool:
        """True if this process writes the run directory and shows messages to the user."""
        return self.this.rank == 0

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.this.size

    def broadcast(self, value: T) -> T:
        """Return the value of the first process to all processes."""
        return value

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all processes, ordered by rank."""
        return [value]

    def all_gather_rows(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows of numbers of all processes, ordered by rank; all have the same length."""
        return [list(row)]

    def broadcast_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the named tensors of the first process to all processes, on the CPU."""
        return dict(tensors)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let the first process of each machine run the with block first; the others then find its cache entries."""
        yield


class ProcessGroup(Processes):
    """Several processes that have joined.

    Args:
        process: this process.
        job: a random word that is the same in all attempts of a job.
        store: the store that `Meeting.arrive` returned, with only the keys of this attempt.
        attempt: the random word of this attempt.
    """

    def __init__(self, process: Process, job: str, store: Store, attempt: str) -> None:
        super().__init__(process, job)
        self._store = store
        self.attempt = attempt
        self._turns = 0

    def broadcast(self, value: T) -> T:
        """Return the value of the first process to all processes."""
        values: list[T] = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all processes, ordered by rank."""
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def all_gather_rows(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows of numbers of all processes, ordered by rank; all have the same length."""
        # On the CPU even if the model is on a GPU: the GPU then need not wait.
        row_tensor = torch.tensor(list(row), dtype=torch.float64)
        rows = [torch.empty_like(row_tensor) for _ in range(self.size)]
        dist.all_gather(rows, row_tensor)
        return [gathered.tolist() for gathered in rows]

    def broadcast_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the named tensors of the first process to all, on the CPU; they are sent one by one to save memory."""
        formats = self.broadcast({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()})
        received: dict[str, Tensor] = {}
        for name, (shape, dtype) in formats.items():
            received[name] = tensors[name].cpu().contiguous() if self.is_first else torch.empty(shape, dtype=dtype)
            dist.broadcast(received[name].view(-1).view(torch.uint8), src=0)  # gloo does not support every dtype
        return received

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let the first process of each machine run the with block first; the others then find its cache entries."""
        self._turns += 1
        done = f"turn {self._turns} of machine {self.this.machine}"
        # Polling: a blocking wait in the store would neither notice a failure nor handle a signal.
        while self.this.local_rank and not self._store.check([done]):
            if has_failed(self._store):
                raise FailedElsewhere(1)
            time.sleep(_POLL_SECONDS)
        yield
        if not self.this.local_rank:
            self._store.set(done, "")


# Words in errors of gloo and NCCL when another process is gone.
_SIGNS = ("gloo", "nccl", "connection", "timed out", "socket")


def choose_process_device(name: str, process: Process) -> torch.device:
    """Return the device of this process; with CUDA, each process of a machine has its own GPU.

    Args:
        name: the device name of the run file.
        process: this process.

    Raises:
        InputError: the machine does not have the device, or has fewer GPUs than processes.
    """
    device = choose_device(name)
    if process.size == 1 or device.type != "cuda":
        return device
    if ":" in name:
        raise InputError(f"train.device is '{name}', but each of several processes takes another GPU: set it to 'cuda'")
    count = torch.cuda.device_count()
    if process.local_size > count:
        raise InputError(
            f"torchrun started {process.local_size} processes on a machine with {count} GPUs: start {count} with "
            f"--nproc-per-node {count}, or train on the CPU with train.device=cpu"
        )
    torch.cuda.set_device(process.local_rank)
    return torch.device("cuda", process.local_rank)


@contextlib.contextmanager
def join_processes(
    process: Process, run: Path, *, device: str, timeout: float, notify: Callable[[str], None]
) -> Iterator[Processes]:
    """Return a context manager in which this process has joined the others; a process alone joins none.

    An error in the with block ends all processes. The first process that fails raises its error, and the others raise
    `FailedElsewhere`.

    Args:
        process: this process.
        run: the run directory, for the message about a process that is gone.
        device: the device name of the run file.
        timeout: the maximum time in seconds that a step waits for the other processes.
        notify: a function that shows a message about a long wait.

    Raises:
        InputError: the device cannot be used, or another process reported wrong input.
        RunFailure: a process did not arrive, or is gone.
        FailedElsewhere: another process shows the error.
    """
    if process.size == 1 and not process.has_agent:
        yield Processes()
        return
    meeting: Meeting | None = None
    try:
        meeting = Meeting(process, notify)
        if process.size == 1:
            yield Processes(process, meeting.job)
            return
        store, attempt = meeting.arrive()
        backend = "cpu:gloo,cuda:nccl" if choose_process_device(device, process).type == "cuda" else "gloo"
        patience = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=store, rank=process.rank, world_size=process.size, timeout=patience)
        yield ProcessGroup(process, meeting.job, store, attempt)
        dist.destroy_process_group()
    except BaseException as error:
        raise _choose_error(error, meeting, process, run) from error
    finally:
        # NCCL would wait here for a process that no longer exists.
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()


def _choose_error(error: BaseException, meeting: Meeting | None, process: Process, run: Path) -> BaseException:
    """Return the error that this process raises; `FailedElsewhere` if another process shows the error."""
    reported, is_first = (
        _make_failure(error, run, process) if _comes_from_lost_process(error) else error,
        process.local_rank == 0,
    )
    if process.size == 1 or isinstance(error, FailedElsewhere):
        return error
    # The store may be gone, together with the machine or process that kept it.
    with contextlib.suppress(RuntimeError):
        if meeting is not None and isinstance(reported, InputError):
            is_first = meeting.report(reported)
        elif meeting is not None and meeting.fault() is not None:
            return FailedElsewhere(2)
        elif meeting is not None:
            is_first = meeting.is_first_to_fail()
    return reported if is_first else FailedElsewhere(_exit_code(reported))


def _exit_code(error: BaseException) -> int:
    if isinstance(error, InputError):
        return 2
    code = getattr(error, "exit_code", getattr(error, "code", 1))
    return code if isinstance(code, int) else 1


def _comes_from_lost_process(error: BaseException) -> bool:
    """Return whether a library error means that another process is gone."""
    if isinstance(error, RunFailure) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in _SIGNS)


def _make_failure(error: BaseException, run: Path, process: Process) -> RunFailure:
    """Return the failure to report when the connection to another process ended."""
    steps, rest = checkpoint_steps(run), "no step was saved, so start the same command again"
    if steps:
        rest = f"only the steps after step {steps[-1]} are lost, and the same command with --resume continues from "
        rest += "there"
    elif process.machine:  # the run directory of the first process may be on another machine
        rest = "the same command with --resume continues from the last checkpoint of process 0, if it saved one"
    cause = "was killed or broke down"
    if "timed out" in str(error).lower():
        cause = "was killed, broke down or took longer for a step than train.timeout"
    return RunFailure(f"Another process of this training {cause}, so all of them stop; {rest}.")
