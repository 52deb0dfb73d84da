"""Training on two machines, simulated by two torchrun agents whose processes are killed on purpose.

    python benchmarks/sigkill.py --kinds machines

`sigkill.py` runs all combinations, with a shared folder and with separate disks; a test runs the most important ones.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from clearhead.checkpoints.runs.checkpoint import checkpoint_folder, checkpoint_steps, load_checkpoint

MOMENTS = ("before", "step", "save")
"""Moments of a kill: before the first checkpoint, in a step, and inside a save."""
MANY = 600.0
"""Seconds after which a wait has failed, even on a busy machine."""


class TwoMachines:
    """Two torchrun agents with one process each, in two folders; leaving the with block kills all their processes.

    Args:
        boxes: the working directory of each agent, with its output files.
        words: the arguments of `clearhead`.
        restarts: the maximum number of restarts by torchrun.
        prefixes: the words before the command of each agent.
    """

    def __init__(
        self,
        boxes: Sequence[Path],
        words: Sequence[str],
        *,
        restarts: int,
        prefixes: Sequence[Sequence[str]] = ((), ()),
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.boxes = boxes
        self.agents: list[subprocess.Popen[bytes]] = []
        self._ended: set[int] = set()
        for box, prefix in zip(boxes, prefixes, strict=True):
            command = [*prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
            command += ["--max-restarts", f"{restarts}", "--rdzv-backend", "c10d"]
            command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "-m", "clearhead", *words]
            with (box / "stdout").open("wb") as out, (box / "stderr").open("wb") as errors:
                self.agents.append(
                    subprocess.Popen(
                        command, cwd=box, stdout=out, stderr=errors, env=os.environ | {"OMP_NUM_THREADS": "1"}
                    )
                )

    def __enter__(self) -> TwoMachines:
        return self

    def __exit__(self, *error: object) -> None:
        processes: list[psutil.Process] = []
        for agent in self.agents:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes += [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
        for process in processes:  # agents first: they would start their children anew
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=60)
        for agent in self.agents:
            agent.wait(60)

    def read_errors(self) -> list[str]:
        """Return the stderr of each machine."""
        return [(box / "stderr").read_text(errors="replace") for box in self.boxes]

    def until(self, happens: Callable[[], Any]) -> Any:
        """Wait until a function returns a true value, and return the value."""
        end = time.monotonic() + MANY
        while not (value := happens()):
            assert time.monotonic() < end, self.read_errors()
            assert all(agent.poll() in (None, 0) for agent in self.agents), self.read_errors()
            time.sleep(0.001)
        return value

    def process(self, rank: int) -> psutil.Process:
        """Wait for the training process of a rank since the latest start of torchrun's workers, and return it."""
        return self.until(lambda: next((process for process in self._processes() if self._is(process, rank)), None))

    def _processes(self) -> Iterator[psutil.Process]:
        for agent in self.agents:
            with contextlib.suppress(psutil.NoSuchProcess):
                yield from psutil.Process(agent.pid).children()

    def _is(self, process: psutil.Process, rank: int) -> bool:
        with contextlib.suppress(psutil.Error):
            return process.pid not in self._ended and process.environ().get("RANK") == f"{rank}"
        return False

    def kill(self, rank: int, moment: str, run: Path) -> None:
        """Kill the process of a rank with SIGKILL at one of the moments.

        Args:
            rank: the rank of the process.
            moment: one of `MOMENTS`; "step" and "save" stand for the next step or save.
            run: the run directory of the first machine.
        """
        steps = max(checkpoint_steps(run), default=0)
        if moment == "before":
            self.until((run / "run.toml").exists)
            assert not checkpoint_steps(run), "too late"
        else:
            self.until(lambda: max(checkpoint_steps(run), default=0) > steps)
        process, writer = self.process(rank), self.process(0)
        if moment == "save":
            self.until(lambda: _is_stopped_in_save(writer, run))
        self._ended |= {process.pid for process in self._processes()}  # torchrun restarts all of them
        process.kill()
        if moment == "save" and rank:
            writer.send_signal(signal.SIGCONT)

    def wait(self, seconds: float = MANY) -> list[int]:
        """Wait for the agents to end, and return their exit codes."""
        end = time.monotonic() + seconds
        return [agent.wait(max(0.1, end - time.monotonic())) for agent in self.agents]


def _is_stopped_in_save(writer: psutil.Process, run: Path) -> bool:
    """Suspend the writing process if a checkpoint is half written, and return whether it is suspended."""
    if not any((run / "checkpoints").glob(".step-*.writing-*")):
        return False
    writer.suspend()
    if any((run / "checkpoints").glob(".step-*.writing-*/weights.safetensors")):
        return True
    writer.resume()
    return False


def differing_states(first: Path, second: Path, step: int) -> list[str]:
    """Return the names of states that differ between the checkpoints of two runs at one step, bit for bit."""
    ends = [load_checkpoint(checkpoint_folder(run, step)) for run in (first, second)]
    differences = [key for key in ("random", "random_of_others", "batches", "schedule") if _differ(key, ends)]
    for name, tensor in ends[0].weights.items():
        differences += [name] * (not torch.equal(tensor, ends[1].weights[name]))
    for index, state in ends[0].optimizer["state"].items():
        others = ends[1].optimizer["state"][index]
        differences += [f"{index}.{name}" for name, value in state.items() if not _equal(value, others[name])]
    return differences


def _differ(key: str, ends: Sequence[Any]) -> bool:
    return bool(ends[0].state[key] != ends[1].state[key])


def _equal(first: Any, second: Any) -> bool:
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def kill_matrix(file: Path, folder: Path, times: int, *, steps: int) -> tuple[int, list[str]]:
    """Kill each process at each moment, with a shared folder and with separate disks.

    Args:
        file: the run file.
        folder: the folder for the runs.
        times: the number of kills for each process, moment and kind of disk.
        steps: the number of steps of the job.

    Returns:
        The number of kills, and the faults.
    """
    changes = [f"train.steps={steps}", "train.save_every=5", "train.validate_every=1000"]
    disks = ["shared", "own"]
    if sys.platform == "linux" and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0:
        disks.append("namespace")
    num, faults = 0, []
    whole = _train(file, folder / "whole", "shared", changes, None)[0]
    for disk in disks:
        for rank, moment, _ in ((r, m, n) for r in range(2) for m in MOMENTS for n in range(times)):
            run, seconds = _train(file, folder / f"killed-{num}", disk, changes, (rank, moment))
            num += 1
            different = differing_states(whole, run, steps)
            if different or seconds > 60:
                faults.append(f"{disk} disk, rank {rank}, {moment}: {seconds:.0f} s, {', '.join(different[:3])} differ")
            print(f"{disk:9} rank {rank} {moment:6} continued after {seconds:.0f} s", flush=True)
            shutil.rmtree(folder / f"killed-{num - 1}", ignore_errors=True)
    return num, faults


def _train(
    file: Path, folder: Path, disk: str, changes: Sequence[str], killed: tuple[int, str] | None
) -> tuple[Path, float]:
    """Train on two machines, kill one process, and return the run and the seconds until the next checkpoint."""
    boxes = [folder / "first", folder / "second"]
    for box in boxes:
        (box / "disk").mkdir(parents=True)
    name, run, prefixes = f"{folder}/run", folder / "run", [(), ()]
    if disk == "own":
        name, run = "run", boxes[0] / "run"
    if disk == "namespace":
        (folder / "mounted").mkdir()
        name, run = f"{folder}/mounted/run", boxes[0] / "disk" / "run"
        mount = 'mount --bind disk "$0" && exec "$@"'
        prefixes = [("unshare", "-m", "sh", "-c", mount, f"{folder}/mounted")] * 2
    with TwoMachines(boxes, ["train", str(file), f"train.run={name}", *changes], restarts=2, prefixes=prefixes) as pair:
        seconds = 0.0
        if killed is not None:
            pair.kill(*killed, run)
            begun, steps = time.monotonic(), checkpoint_steps(run)
            pair.until(lambda: checkpoint_steps(run) not in ([], steps) or all(a.poll() == 0 for a in pair.agents))
            seconds = time.monotonic() - begun
        assert pair.wait() == [0, 0], pair.read_errors()
    return run, seconds
