"""Rank and address of this process among all processes of a training, from environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from clearhead.base.errors import InputError

_NUMBERS: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT")


class FailedElsewhere(SystemExit):
    """Ends a process without a message, because another process of the same training shows the error."""


@dataclass(frozen=True)
class Process:
    """Rank and address of this process in a training; the defaults describe a process that trains alone.

    Args:
        rank: the number of this process, from 0.
        size: the number of processes on all machines.
        local_rank: the number of this process on its machine, from 0.
        local_size: the number of processes on its machine.
        machine: the number of its machine, from 0.
        address, port: the address of the common store; "" and 0 for a process alone.
        has_agent: True if torchrun keeps the common store, which then outlives a restart of the processes.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    machine: int = 0
    address: str = ""
    port: int = 0
    has_agent: bool = False

    @classmethod
    def here(cls) -> Process:
        """Return this process as the environment variables describe it.

        Raises:
            InputError: variables are missing, are not numbers, or contradict each other; one line names all faults.
        """
        texts = {name: os.environ[name] for name in _NUMBERS if os.environ.get(name)}
        numbers = {name: int(text) for name, text in texts.items() if text.isascii() and text.isdecimal()}
        address = os.environ.get("MASTER_ADDR", "")
        faults = [f"{name} is '{text}', expected a whole number" for name, text in texts.items() if name not in numbers]
        faults += _contradictions(texts, numbers, address)
        if faults:
            raise InputError(f"{'; '.join(faults)}: start the processes with torchrun, which sets these variables")
        if "RANK" not in texts:
            _refuse_slurm_tasks()
        rank, size = numbers.get("RANK", 0), numbers.get("WORLD_SIZE", 1)
        local_size = numbers.get("LOCAL_WORLD_SIZE", size)
        return cls(
            rank=rank,
            size=size,
            local_rank=numbers.get("LOCAL_RANK", rank),
            local_size=local_size,
            machine=numbers.get("GROUP_RANK", rank // max(1, local_size)),
            address=address,
            port=numbers.get("MASTER_PORT", 0),
            has_agent=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


ALONE: Final = Process()


def _contradictions(texts: Mapping[str, str], numbers: Mapping[str, int], address: str) -> list[str]:
    """Return one phrase for each missing variable and for each number out of range."""
    faults = [
        f"{number} is {texts[number]}, but {limit} is {texts[limit]}"
        for number, limit in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        if number in numbers and limit in numbers and numbers[number] >= numbers[limit]
    ]
    if "RANK" in texts and "WORLD_SIZE" not in texts:
        faults.append(f"RANK is {texts['RANK']}, but WORLD_SIZE is not set")
    size = numbers.get("WORLD_SIZE", 1)
    if size == 0 and "RANK" not in texts:
        faults.append("WORLD_SIZE is 0, expected at least 1")
    if size > 1:
        if "RANK" not in texts:
            faults.append(f"WORLD_SIZE is {size}, but RANK is not set")
        faults += [f"{name} is not set" for name in ("MASTER_ADDR",) if not address]
        faults += [f"{name} is not set" for name in ("MASTER_PORT",) if name not in texts]
        if not 0 < numbers.get("MASTER_PORT", 1) < 2**16:
            faults.append(f"MASTER_PORT is {texts['MASTER_PORT']}, expected a port from 1 to 65535")
    return faults


def _refuse_slurm_tasks() -> None:
    """Refuse Slurm tasks that torchrun did not start: each would train the same run alone."""
    tasks, boxes = os.environ.get("SLURM_NTASKS", ""), os.environ.get("SLURM_NNODES", "")
    if not tasks.isdecimal() or int(tasks) < 2:
        return
    num_boxes = int(boxes) if boxes.isdecimal() and boxes != "0" else 1
    launcher = f"srun --ntasks-per-node=1 torchrun --nnodes={num_boxes} --nproc-per-node={-(-int(tasks) // num_boxes)}"
    if num_boxes > 1:
        launcher += " --rdzv-backend=c10d --rdzv-endpoint=$(scontrol show hostnames | head -n 1):29400"
    raise InputError(
        f"SLURM_NTASKS is {tasks}, but RANK is not set, so each task would train the same run alone. Start one task on "
        f"each machine, and let torchrun start the processes: {launcher} -m clearhead train ..."
    )
