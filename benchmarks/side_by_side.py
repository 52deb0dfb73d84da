"""Sides of a benchmark: each in a process of its own, so that its memory is its own, and all of them take turns.

Only the standard library and `pairing` are imported here, so that a side can run in the environment of another library.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pairing import Ratio, Spread

Run = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """What a side does when it is its turn.

    Args:
        run: the work.
        by_ids: the same from ids to ids, without texts; None: not measured.
        system: a line in which its library says what it is and what it uses of the machine.
    """

    run: Run
    by_ids: Run | None = None
    system: str = ""


FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
"""What decides how fast a processor multiplies matrices."""
PEERS = ("torch", "transformers", "sentence-transformers", "ctranslate2", "llama_cpp_python")


def machine(threads: int) -> dict[str, Any]:
    """Return what a figure depends on: the processor, what it can do, and the versions."""
    name, flags = platform.processor() or platform.machine(), []
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        name = fields.get("model name", name)
        flags = [flag for flag in FLAGS if flag in fields.get("flags", "").split()]
    versions = {}
    for peer in PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[peer] = importlib.metadata.version(peer)
    return {
        "processor": name, "flags": flags, "cores": os.cpu_count(), "threads": threads, "load": os.getloadavg()[0],
        "versions": versions,
    }  # fmt: skip


def describe(facts: dict[str, Any]) -> str:
    """Return the lines that stand above a table."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"{facts['processor']}, {facts['cores']} cores ({' '.join(facts['flags']) or 'none of ' + ' '.join(FLAGS)}), "
        f"{facts['threads']} threads, load {facts['load']:.1f} at the start\n{versions}"
    )


def memory() -> tuple[int, int]:
    """Return the bytes of memory that this process has now, and the most that it had.

    `ru_maxrss` alone would count what the parent had when it started this process.
    """
    try:
        lines = Path("/proc/self/status").read_text("ascii", "replace").splitlines()
        fields = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
        return 1024 * int(fields["VmRSS"]), 1024 * int(fields["VmHWM"])
    except (OSError, KeyError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most * (1 if sys.platform == "darwin" else 1024), most * (1 if sys.platform == "darwin" else 1024)


def serve(prepare: Callable[[], Work]) -> None:
    """Be a side: prepare the work, do it once, and then as often as a line comes; answer with seconds and memory.

    The work from ids follows that from texts, on every turn.

    Args:
        prepare: loads what is needed, and returns the work.
    """
    # Libraries print; what they print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    work = prepare()

    def answer() -> None:
        seconds = [measure_seconds(run) for run in (work.run, work.by_ids) if run is not None]
        now, most = memory()
        results = {"seconds": seconds, "working_set": now, "peak": most, "system": work.system}
        answers.write(json.dumps(results) + "\n")
        answers.flush()

    answer()
    for _ in sys.stdin:
        answer()


def measure_seconds(run: Run) -> float:
    """Return the seconds of a run."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class Side:
    """One side: a process that does the work when it is its turn.

    Args:
        name: in the table.
        command: of the process, which calls `serve`.
        threads: of its libraries.
    """

    def __init__(self, name: str, command: Sequence[str], threads: int) -> None:
        self.name, self.failure, self.system = name, "", ""
        self.seconds: list[float] = []
        self.by_ids: list[float] = []
        self.working_set = self.peak = 0
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 closed in `close`
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        self._answer()

    def run(self) -> None:
        """Let it do its work once, if it can."""
        if not self.failure and self._process.stdin is not None:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            seconds = self._answer()
            self.seconds += seconds[:1]
            self.by_ids += seconds[1:]

    def printed_lines(self, *words: str) -> list[str]:
        """Return what its libraries printed, line by line from one of these words on."""
        self._said.seek(0)
        lines = self._said.read().splitlines()
        return [line[line.index(word) :] for line in lines for word in words if word in line]

    def close(self) -> None:
        """End its process."""
        self._process.communicate()
        self._said.close()

    def _answer(self) -> list[float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._said.seek(0)
            lines = self._said.read().strip().splitlines()
            self.failure = lines[-1] if lines else f"exit code {self._process.returncode}"
            return []
        results = json.loads(line)
        self.working_set, self.peak, self.system = results["working_set"], results["peak"], results["system"]
        seconds: list[float] = results["seconds"]
        return seconds


def alternate(sides: Sequence[Side], rounds: int) -> None:
    """Let every side work once in each round; every second round goes backwards."""
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            side.run()


def figures(sides: Iterable[Side], work: float, limit: Callable[[str], float | None]) -> dict[str, dict[str, Any]]:
    """Return the figures of each side; a ratio is that of our best side to it, by pairing their turns.

    Args:
        sides: all of a case; the names of ours begin with "clearhead".
        work: units of one run.
        limit: the seconds that the machine needs at least for the run of a side with this name; None: not known.
    """
    results: dict[str, dict[str, Any]] = {}
    for side in sides:
        if side.failure:
            results[side.name] = {"failure": side.failure}
            continue
        middle, least = statistics.median(side.seconds), limit(side.name)
        results[side.name] = {
            "work": work, "per_second": work / middle, "seconds": side.seconds,
            "working_set": side.working_set, "peak": side.peak,
            "share": None if least is None else least / middle, "system": side.system,
            "by_ids": work / statistics.median(side.by_ids) if side.by_ids else None,
        }  # fmt: skip
    ours = [name for name, result in results.items() if "seconds" in result and name.startswith("clearhead")]
    best = max(ours, key=lambda name: results[name]["per_second"], default=None)
    for name, result in results.items():
        is_peer = "seconds" in result and not name.startswith("clearhead")
        result["ratio"] = asdict(Ratio.of(result["seconds"], results[best]["seconds"])) if best and is_peer else None
    return results


def table(title: str, unit: str, results: dict[str, dict[str, Any]]) -> str:
    """Return the lines of one case."""
    width = 2 + max(26, *map(len, results))
    heads = f"{unit + '/s (spread)':>36} {'by ids':>12} {'ours (95 % interval)':>24} {'of limit':>9} "
    heads += f"{'working set':>12} {'peak':>9}"
    lines = [f"{title:{width}} {heads}"]
    for name, result in results.items():
        if "failure" in result:
            lines.append(f"  {name:{width - 2}} failed: {result['failure'][:90]}")
            continue
        ratio = f"{Ratio(**result['ratio'])} x" if result["ratio"] else ""
        speeds = Spread.of([result["work"] / seconds for seconds in result["seconds"]])
        share = f"{result['share']:.0%}" if result["share"] else ""
        sizes = f"{result['working_set'] / 1e6:9,.0f} MB {result['peak'] / 1e6:6,.0f} MB"
        by_ids = f"{result['by_ids']:,.1f}" if result["by_ids"] else ""
        lines.append(f"  {name:{width - 2}} {speeds!s:>36} {by_ids:>12} {ratio:>24} {share:>9} {sizes}")
    return "\n".join(lines)
