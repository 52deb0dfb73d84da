"""Trainings in groups of processes for `test_processes`, one after the other.

    python -m tests.training.parallel.group_job FOLDER

FOLDER/trainings.json is a list of trainings, each an object with name, size, file, changes and resume. `is_watched`
captures activations during validation, `is_blind` treats separate folders as a shared one, and `reads_late` reads the
losses one step late, as on CUDA. `is_compiled` compiles without Inductor, and counts graphs in place of the
communication. All processes are forked from one that has imported the library, so that it is
imported once. Each writes its result to FOLDER/NAME.RANK.json.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import random
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead.fast.training import compiled
from clearhead.training import assemble, step
from clearhead.training.parallel import agreement, meeting
from clearhead.training.runfile.read import load_run_file
from tests.laws.compiled_training_job import use_backend
from tests.training.parallel.groups import watch_validations
from tests.training.quick import leave_out
from tests.training.small import Recorder

# Modules that engines import at first use, a second or two in each process.
LATE = ("torch.distributed.fsdp", "clearhead.training.parallel.sharded", "sacrebleu")


class Communication(TorchDispatchMode):
    """Counts the communication between processes, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the operations of c10d."""
        if func.namespace == "c10d":
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def train(training: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train as one of several processes, and return the result."""
    os.environ |= {
        "RANK": f"{rank}", "WORLD_SIZE": f"{training['size']}", "LOCAL_RANK": f"{rank}",
        "LOCAL_WORLD_SIZE": f"{training['size']}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{training['port']}",
    }  # fmt: skip
    meeting.ARRIVAL_SECONDS = training.get("arrival", 600.0)  # type: ignore[misc]
    meeting._trainings = itertools.count()
    agreement._SEEN_SECONDS = 0.5  # type: ignore[misc]
    leave_out(pytest.MonkeyPatch())
    os.chdir(training.get("folders", [training["folder"]] * 8)[rank])
    changes = [*training.get("changes", []), *training.get("changes_by_rank", {}).get(str(rank), [])]
    shown, communication, before = Recorder(), Communication(), compiled.count_graphs()
    # PyTorch compiles nothing inside a dispatch mode.
    mode = contextlib.nullcontext() if training.get("is_compiled") else communication
    with mode, pytest.MonkeyPatch.context() as watching:
        if training.get("is_blind"):
            watching.setattr(assemble, "refuse_sharing", lambda blind, run: None)
        if training.get("is_compiled"):
            use_backend(watching, "aot_eager")
        if training.get("reads_late"):
            watching.setattr(step, "updates_on_device", lambda *_: True)
        seen = watch_validations(watching) if training.get("is_watched") else {}
        result = assemble.train_run(
            load_run_file(Path(training["file"]), changes), resume=training.get("resume", False), progress=shown
        )
    return {
        "seen": seen,
        "result": [result.step, result.best, result.best_value, result.reason.split(" and ")[0]],
        "losses": [step.loss for step in shown.steps],
        "tokens": [step.tokens for step in shown.steps],
        "validations": [[report.step, report.loss, report.score] for report in shown.validations],
        "messages": shown.messages,
        "communication": dict(communication.counts),
        "graphs": compiled.count_graphs() - before,
    }


def child(trainings: list[dict[str, Any]], rank: int, folder: Path) -> None:
    """Take part in every training with enough processes for this rank."""
    torch.set_num_threads(1)
    for training in trainings:
        if rank >= training["size"] or rank in training.get("absent", ()):
            continue
        try:
            result = train(training, rank)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            result = {
                "error": [type(error).__name__, str(error)],
                "code": getattr(error, "code", None),
                "trace": traceback.format_exc(),
            }
        (folder / f"{training['name']}.{rank}.json").write_text(json.dumps(result))


def free_ports() -> Iterator[int]:
    """Yield free ports outside the range from which the system assigns ports.

    An assigned port could belong to gloo in an earlier training, and processes would wait there for an answer.
    """
    for port in random.sample(range(20_000, 32_000), 12_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            yield port


def main() -> None:
    """Fork the processes, and wait for them."""
    folder = Path(sys.argv[1])
    for name in LATE:
        importlib.import_module(name)
    trainings = json.loads((folder / "trainings.json").read_text())
    for training, port in zip(trainings, free_ports(), strict=False):
        training["port"] = port
    children = []
    for rank in range(max(training["size"] for training in trainings)):
        number = os.fork()
        if number == 0:
            child(trainings, rank, folder)
            os._exit(0)
        children.append(number)
    for number in children:
        os.waitpid(number, 0)


if __name__ == "__main__":
    main()
