"""Sides of a benchmark that take turns, each in its own process, so that its memory can be measured.

This file imports only the standard library and `pairing`, so that a side can run in the environment of another library.
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
    """Work of a side for one turn.

    Args:
        run: function that does the work of one turn.
        by_ids: the same work from ids to ids, without texts. None means not measured.
        system: a line with the version of the library and the instructions that it uses.
    """

    run: Run
    by_ids: Run | None = None
    system: str = ""


FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
"""Processor flags that decide the speed of matrix products."""
REST = 2.2
"""Seconds before each turn: clearhead looks once a second whether other programs use the processors."""
PEERS = ("torch", "transformers", "sentence-transformers", "ctranslate2", "llama_cpp_python")


def machine(threads: int) -> dict[str, Any]:
    """Return facts that figures depend on: the processor, its flags, and versions."""
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
    """Return the lines above a table: processor, flags and versions."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"{facts['processor']}, {facts['cores']} cores ({' '.join(facts['flags']) or 'none of ' + ' '.join(FLAGS)}), "
        f"{facts['threads']} threads, load {facts['load']:.1f} at the start\n{versions}"
    )


def memory() -> tuple[int, int]:
    """Return the current and the maximum resident bytes of this process.

    `ru_maxrss` would also count the memory of the parent at the start of this process.
    """
    try:
        lines = Path("/proc/self/status").read_text("ascii", "replace").splitlines()
        fields = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
        return 1024 * int(fields["VmRSS"]), 1024 * int(fields["VmHWM"])
    except (OSError, KeyError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most * (1 if sys.platform == "darwin" else 1024), most * (1 if sys.platform == "darwin" else 1024)


def serve(prepare: Callable[[], Work]) -> None:
    """Run a side: prepare the work, do it once, then once per input line; answer each line with seconds and memory.

    Each turn does the work from texts, then the work from ids.

    Args:
        prepare: function that loads the model and returns the work.
    """
    # Libraries print; their output must not mix with the answers.
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
    """Return the seconds of one run of the work."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


class Side:
    """One side: a process that does its work when it is its turn.

    Args:
        name: the name in the table.
        command: the command of the process, which calls `serve`.
        threads: the number of threads of its libraries.
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
        """Let the process do its work once, unless it has failed."""
        if not self.failure and self._process.stdin is not None:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            seconds = self._answer()
            self.seconds += seconds[:1]
            self.by_ids += seconds[1:]

    def output_lines(self, *words: str) -> list[str]:
        """Return the printed lines that contain one of `words`, each from this word to the end of the line."""
        self._said.seek(0)
        lines = self._said.read().splitlines()
        return [line[line.index(word) :] for line in lines for word in words if word in line]

    def close(self) -> None:
        """End the process."""
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
    """Let every side work once per round, on a machine at rest; every second round has the reverse order."""
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            time.sleep(REST)
            side.run()


def figures(sides: Iterable[Side], work: float, limit: Callable[[str], float | None]) -> dict[str, dict[str, Any]]:
    """Return the figures of each side, with the ratio of the best clearhead side to each peer, by paired turns.

    Args:
        sides: all sides of a case; names of clearhead's sides begin with "clearhead".
        work: the units of one run.
        limit: function that returns the minimum seconds of a run for the name of a side. None means not known.
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
    """Return the table of one case."""
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
