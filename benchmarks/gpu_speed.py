"""Speed of training, decoding and embedding on one GPU, compared with nanoGPT, transformers and sentence-transformers.

    python benchmarks/gpu_speed.py --nanogpt ../nanoGPT [--groups decode marian] [--seconds 480] [--slow] [--json]

All models have random weights, and all texts are generated, so that no network and no data are needed. A library that
is not installed is left out and named. Each group of cases runs in its own process. The sides of a case take turns on
the same warm device: three turns after a warm-up, of which the shortest counts. A case for which too little time is
left is skipped and named; the process of a group ends at the deadline.

A row of the table is one side. It has units per second, milliseconds per model step, the number of model steps, and
the share of the limit. The next columns count per step: kernels and graphs that the host launches, host reads, and
copies. Then follow the share of time in which the GPU works, the peak memory, and the seconds until the end of the
second run. These seconds include loading, compiling and capturing. The ratio in the row of a peer is the rate of the
fastest clearhead side divided by the peer's. The limit follows from the memory bandwidth and the products of 8,192 x
8,192 matrices, measured in the same run. After the table, cases that miss their target are listed.
The option --slow adds transformers with a static, compiled cache at batch 1 and 64. The option --json prints
everything as one object.

The ablation shows what the vocabulary, reading the loss at once, copies in the step, the feed and deterministic
algorithms cost a step. Without a GPU the same code runs on tiny sizes, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_sizes import FULL, TARGETS, TINY, Target
from pairing import Ratio
from side_by_side import describe, machine


@dataclass(frozen=True)
class Group:
    """Cases that run in one process.

    Args:
        seconds: the seconds that the group takes on an H100 without --slow.
        cases: the names of its cases, to name them if the group is skipped.
    """

    seconds: float
    cases: tuple[str, ...]


GROUPS = {
    "step": Group(110, ("train-124M",)),
    "ablation": Group(40, ("ablation-124M",)),
    "command": Group(45, ("command-124M",)),
    "small": Group(50, ("train-10.7M", "command-10.7M")),
    "decode": Group(65, ("decode-1", "decode-8", "decode-64", "decode-256", "sample-1", "sample-256")),
    "prompt": Group(10, ("prompt-1000",)),
    "marian": Group(30, ("translate-1x1", "translate-64x1", "translate-64x4")),
    "embed": Group(25, ("embed",)),
    "translate": Group(40, ("train-translate",)),
    "first": Group(40, ("first",)),
    "demo": Group(60, ("demo",)),
}
"""Groups in the order in which they run."""
COMMANDS = ("first", "demo")
"""Groups that only run commands of clearhead, which tiny sizes make no shorter."""
MATRIX_SIZE = 8192
TINY_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""Environment of tiny sizes, for which threads would mostly wait for each other."""
LARGEST_LINE = 100


def run_groups(settings: dict[str, Any]) -> None:
    """Run groups in this process; print one line of JSON for each side.

    Args:
        settings: the groups and the fields of `Bench`, as JSON has them.
    """
    # Libraries print; their output must not mix with the figures.
    figures = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import torch
    from gpu_inference import (
        measure_decoding,
        measure_demo,
        measure_embedding,
        measure_first_answer,
        measure_marian,
        measure_prompt,
    )
    from gpu_sides import Bench, clear_memory, report_failure
    from gpu_training import measure_ablation, measure_command, measure_steps, measure_translation

    def write(line: str) -> None:
        figures.write(line + "\n")
        figures.flush()

    device = torch.device(settings["device"])
    path = {name: Path(settings[name]) if settings[name] else None for name in ("nanogpt", "data", "folder")}
    assert path["folder"] is not None
    bench = Bench(
        device, FULL if settings["is_full"] else TINY, settings["deadline"], path["folder"], path["nanogpt"],
        settings["is_slow"], settings["bytes_per_second"], settings["flops"], write,
    )  # fmt: skip

    if not settings["is_full"]:
        trace_only()

    def measure_small() -> None:
        measure_steps(bench, "10.7M")
        measure_command(bench, "10.7M")

    work: dict[str, Callable[[], None]] = {
        "machine": lambda: measure_machine(bench),
        "step": lambda: measure_steps(bench, "124M"),
        "ablation": lambda: measure_ablation(bench, "124M"),
        "command": lambda: measure_command(bench, "124M"),
        "small": measure_small,
        "decode": lambda: measure_decoding(bench),
        "prompt": lambda: measure_prompt(bench),
        "marian": lambda: measure_marian(bench),
        "embed": lambda: measure_embedding(bench),
        "translate": lambda: measure_translation(bench, path["data"]),
        "first": lambda: measure_first_answer(bench),
        "demo": lambda: measure_demo(bench),
    }
    for name in settings["groups"]:
        with report_failure(bench, name, "group"):
            work[name]()
        clear_memory()


def trace_only() -> None:
    """Let torch.compile trace graphs in this process without generating code for them, which takes half a minute."""
    import torch

    compile_function = torch.compile

    def trace(function: Any, *, fullgraph: bool = False, dynamic: bool | None = None, **_: Any) -> Any:
        return compile_function(function, fullgraph=fullgraph, dynamic=dynamic, backend="eager")

    torch.compile = trace  # type: ignore[assignment]


def measure_machine(bench: Any) -> None:
    """Report the device and its limits."""
    import torch

    from clearhead.apps.bench.limits import fast_precisions, measure_limits

    facts: dict[str, Any] = machine(torch.get_num_threads())
    keys = {"size": MATRIX_SIZE} if bench.device.type != "cpu" else {"size": 256, "buffer_bytes": 8_000_000}
    limits = measure_limits(bench.device, [name for name in fast_precisions(bench.device) if name != "int4"], **keys)
    facts |= {"bytes_per_second": limits.bytes_per_second, "flops": limits.flops.get("bf16", limits.flops["fp32"])}
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        facts |= {
            "gpu": properties.name, "gpu_bytes": properties.total_memory,
            "gpu_capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda,
        }  # fmt: skip
    bench.report("machine", str(bench.device), **facts)


class Record:
    """Figures of all groups, from the processes that measure them.

    Args:
        settings: the settings that each process gets.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.cases: dict[str, dict[str, dict[str, Any]]] = {}
        self.notes: dict[str, list[str]] = {}
        self.skipped: list[str] = []

    def run(self, groups: Sequence[str]) -> list[str]:
        """Run groups in one process, until the deadline at the latest; return the names of the reported cases."""
        command = [sys.executable, str(Path(__file__)), "--settings", json.dumps(self.settings | {"groups": groups})]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as messages:
            environment = os.environ if self.settings["is_full"] else {**os.environ, **TINY_ENVIRONMENT}
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=messages, text=True, env=environment)
            timer = threading.Timer(max(1.0, self.settings["deadline"] - time.time() + 5), process.kill)
            timer.start()
            assert process.stdout is not None
            reported = [self._read(line) for line in process.stdout]
            process.wait()
            timer.cancel()
            if process.returncode:
                messages.seek(0)
                lines = messages.read().strip().splitlines() or [""]
                reason = f"ended with code {process.returncode}: {lines[-1][:LARGEST_LINE]}"
                self.skipped.append(f"{', '.join(groups)}: {reason}")
        return list(dict.fromkeys(filter(None, reported)))

    def _read(self, line: str) -> str:
        figures = json.loads(line)
        case, side = figures.pop("case"), figures.pop("side")
        if not case or "skipped" in figures:
            self.skipped.append(f"{case} {side}: {figures['skipped']}".strip())
            return ""
        if "note" in figures:
            self.notes.setdefault(case, []).append(figures["note"])
        else:
            self.cases.setdefault(case, {})[side] = figures
        return str(case)

    def rate(self, case: str, side: str) -> float | None:
        """Return the units per second of a side in its shortest turn; None if it was not measured."""
        figures = self.cases.get(case, {}).get(side, {})
        return figures["amount"] / min(figures["seconds"]) if figures.get("seconds") else None

    def check_target(self, target: Target) -> dict[str, Any]:
        """Return a target with the rate that was reached, and the rate or the share that was asked for."""
        rate = self.rate(target.case, target.side)
        base = self.rate(*target.relative_to) if target.relative_to else 1.0
        reached = None if rate is None or base is None else rate / base
        return {
            "case": target.case, "side": target.side, "target": target.rate, "reached": reached,
            "relative_to": target.relative_to, "is_reached": None if reached is None else reached >= target.rate,
        }  # fmt: skip


def format_case(record: Record, case: str) -> str:
    """Return the table of one case."""
    sides = record.cases[case]
    width = max(34, *map(len, sides))
    unit = next((figures["unit"] for figures in sides.values() if "unit" in figures), "")
    limit = next((figures["limit"] for figures in sides.values() if figures.get("limit")), None)
    title = f"{case}{f', limit {limit:,.0f} {unit}/s' if limit else ''}"
    lines = [
        f"{title:{width + 2}} {unit + '/s':>14} {'ms/step':>9} {'steps':>6} {'ours':>6} {'limit':>6} {'launches':>9} "
        f"{'reads':>6} {'copies':>7} {'busy':>5} {'peak':>9} {'ready':>7}"
    ]
    ours = [(rate, side) for side in sides if side.startswith("clearhead") and (rate := record.rate(case, side))]
    fastest = max(ours)[1] if ours else None
    for side, figures in sides.items():
        if not figures.get("seconds"):
            lines.append(f"  {side:{width}} failed: {figures.get('failure', 'no figures')[:LARGEST_LINE]}")
            continue
        least, rate = min(figures["seconds"]), figures["amount"] / min(figures["seconds"])
        is_peer = fastest is not None and not side.startswith("clearhead")
        seconds = sides[fastest]["seconds"] if fastest is not None and is_peer else []
        paired = list(zip(figures["seconds"], seconds, strict=False))
        ratio = f"{Ratio.of(*map(list, zip(*paired, strict=True))).median:.2f}" if paired else ""
        step = 1000 * least / max(1, figures["steps"])
        busy = 1000 * figures.get("busy_seconds", 0.0) / step
        share = f"{rate / figures['limit']:.1%}" if figures["limit"] else ""
        lines.append(
            f"  {side:{width}} {rate:14,.0f} {step:9.3f} {figures['steps']:6} {ratio:>6} {share:>6} "
            f"{_count(figures, 'launches', 0):>9} {_count(figures, 'host_reads', 2):>6} "
            f"{_count(figures, 'copies', 1):>7} {f'{busy:.0%}' if busy else '':>5} "
            f"{figures.get('peak_bytes', 0) / 1e6:6,.0f} MB {figures['ready_seconds']:5.1f} s"
        )
    return "\n".join([*lines, *format_details(sides), *(f"    {note}" for note in record.notes.get(case, ()))])


def _count(figures: dict[str, Any], name: str, digits: int) -> str:
    return f"{figures[name]:,.{digits}f}" if name in figures else ""


def format_details(sides: dict[str, dict[str, Any]]) -> list[str]:
    """Return lines with the attention kernels of each side and the slowest Python functions."""
    lines = []
    for side, figures in sides.items():
        kernels = figures.get("attention_kernels", {})
        if kernels:
            counts = ", ".join(f"{name} {count:.1f}" for name, count in kernels.items())
            lines.append(f"    {side}, attention kernels per step: {counts}")
        for row in figures.get("functions", ()):
            lines.append(f"    {side}, {row['seconds']:8.4f} s in {row['calls']:7,} calls of {row['function']}")
    return lines


def format_targets(checked: Sequence[dict[str, Any]]) -> str:
    """Return lines with the targets that were missed or not measured."""
    lines = []
    for row in checked:
        relative = f" x {' '.join(row['relative_to'])}" if row["relative_to"] else "/s"
        name = f"{row['case']}, {row['side']}: target {row['target']:,.3g}{relative}"
        if row["is_reached"] is None:
            lines.append(f"{name}, not measured")
        elif not row["is_reached"]:
            lines.append(f"{name}, reached {row['reached']:,.3g}")
    return "\n".join(lines) or "every target is reached"


def measure(options: argparse.Namespace, folder: str) -> Record:
    """Run all groups that are asked for and print their tables to stderr; return the record."""
    is_full = options.device != "cpu" and not options.tiny
    record = Record(
        {
            "device": options.device, "is_full": is_full, "deadline": time.time() + options.seconds, "folder": folder,
            "nanogpt": str(options.nanogpt or ""), "data": str(options.data or ""), "is_slow": options.slow,
            "bytes_per_second": 0.0, "flops": 0.0,
        }
    )  # fmt: skip
    # With tiny sizes nothing is measured, so one process imports the libraries once.
    batches = [["machine", *options.groups]] if not is_full else [["machine"], *([name] for name in options.groups)]
    for groups in batches:
        left = record.settings["deadline"] - time.time()
        if left < 0.5 * sum(GROUPS[name].seconds for name in groups if name in GROUPS and is_full):
            names = [case for name in groups if name in GROUPS for case in GROUPS[name].cases]
            record.skipped += [f"{name}: too little time is left" for name in names]
            continue
        for case in record.run(groups):
            if case == "machine":
                print_machine(record)
            else:
                print(format_case(record, case), file=sys.stderr, flush=True)
    return record


def print_machine(record: Record) -> None:
    """Print the device and its limits, and give the limits to all groups that follow."""
    (device, facts), *_ = record.cases["machine"].items()
    record.settings |= {name: facts[name] for name in ("bytes_per_second", "flops")}
    name = f"{facts['gpu']} (capability {facts['gpu_capability']}), CUDA {facts['cuda']}" if "gpu" in facts else device
    print(f"{name}; {describe(facts)}", file=sys.stderr)
    rates = f"{facts['bytes_per_second'] / 1e9:,.0f} GB/s, {facts['flops'] / 1e12:,.1f} TFLOP/s"
    print(f"limits: {rates}", file=sys.stderr, flush=True)


def find_device() -> str:
    """Return the device to measure: "cuda" if the system has an NVIDIA GPU, otherwise "cpu"."""
    command = [sys.executable, "-c", "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--data", type=Path, help="the folder multi30k-bpe; default: generated sentences")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), help="default: all; on a CPU not first and demo")
    parser.add_argument("--seconds", type=float, default=480.0, help="seconds after which nothing is measured")
    parser.add_argument("--slow", action="store_true", help="also measure transformers with a compiled static cache")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: the GPU if there is one")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a GPU too, to try the program")
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON object at the end")
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.settings:
        run_groups(json.loads(options.settings))
        return
    options.device = options.device or find_device()
    options.groups = options.groups or [name for name in GROUPS if name not in COMMANDS or options.device != "cpu"]
    with tempfile.TemporaryDirectory() as folder:
        record = measure(options, folder)
    checked = [record.check_target(target) for target in TARGETS]
    if record.settings["is_full"]:
        print(f"\ntargets missed:\n{format_targets(checked)}", file=sys.stderr)
    if record.skipped:
        print("\nskipped:\n" + "\n".join(record.skipped), file=sys.stderr)
    if options.json:
        facts = record.cases.pop("machine", {})
        report = {"machine": facts, "cases": record.cases, "notes": record.notes, "targets": checked}
        print(json.dumps(report | {"skipped": record.skipped}))


if __name__ == "__main__":
    main()
