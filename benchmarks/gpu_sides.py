"""Measurement of sides that take turns in one process, for the groups of `gpu_speed.py`."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_counts import PeakMemory, Run, count_work, longest_functions, measure_seconds
from gpu_sizes import Sizes

FAILURES = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, AssertionError, OSError, ImportError)
"""Errors after which a side is reported as failed, and the others go on."""
TURNS = 3


@dataclass(frozen=True)
class Side:
    """One side of a case.

    Args:
        name: the name in the table; names of clearhead's sides begin with "clearhead".
        prepare: function that loads or builds the side and returns its work for one turn.
        seconds: the seconds that preparation and turns take on a GPU; the side is skipped if less time is left.
        steps: function that returns the model steps of the last turn. None means `Case.steps`.
        is_profiled: True if the launches and host reads of the work are counted.
    """

    name: str
    prepare: Callable[[], Run]
    seconds: float = 5.0
    steps: Callable[[], int] | None = None
    is_profiled: bool = True


@dataclass(frozen=True)
class Case:
    """Work that all sides of a case do.

    Args:
        name: the name of the case.
        unit: the counted unit, such as "tokens".
        amount: the units of one turn.
        steps: the model steps of one turn.
        limit: the highest possible rate in units per second. None means not known.
        names_functions: True to list the Python functions in which clearhead's sides spend their time.
    """

    name: str
    unit: str
    amount: float
    steps: int
    limit: float | None = None
    names_functions: bool = False


@dataclass
class Bench:
    """Settings of the groups of one process, and the output of their figures.

    Args:
        device: the device to measure.
        sizes: the sizes of all cases.
        deadline: the time, as `time.time` counts it, after which nothing begins.
        folder: the folder of checkpoints and data, which all groups share.
        nanogpt: a checkout of nanoGPT. None means that it is left out.
        is_slow: True to run the compiled sides of transformers as well.
        bytes_per_second, flops: the measured limits of the device in bf16; 0 means not measured.
        write: function that prints one line of JSON.
    """

    device: torch.device
    sizes: Sizes
    deadline: float
    folder: Path
    nanogpt: Path | None
    is_slow: bool
    bytes_per_second: float
    flops: float
    write: Callable[[str], None]
    reported: set[str] = field(default_factory=set)

    def seconds_left(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline - time.time()

    def report(self, case: str, side: str, **figures: Any) -> None:
        """Print the figures of a side, or the reason why it has none (`skipped` or `failure`)."""
        self.write(json.dumps({"case": case, "side": side, **figures}))

    def note(self, case: str, text: str) -> None:
        """Print a sentence below the table of a case."""
        self.write(json.dumps({"case": case, "side": "", "note": text}))

    def leave_out(self, name: str, reason: str) -> None:
        """Report once that a library or a file is missing."""
        if name not in self.reported:
            self.reported.add(name)
            self.report("", name, skipped=reason)

    def seconds_of_step(self, moved_bytes: float, operations: float) -> float | None:
        """Return the least seconds of some work by both limits; None if the limits were not measured."""
        if not self.bytes_per_second or not self.flops:
            return None
        return max(moved_bytes / self.bytes_per_second, operations / self.flops)


def measure_case(bench: Bench, case: Case, sides: list[Side]) -> None:
    """Prepare the sides of a case, let them take turns, and report the figures of each."""
    works: dict[str, Run] = {}
    figures: dict[str, dict[str, Any]] = {}
    peaks: dict[str, PeakMemory] = {}
    for side in sides:
        if bench.seconds_left() < side.seconds:
            bench.report(case.name, side.name, skipped="too little time is left")
            continue
        with report_failure(bench, case.name, side.name):
            gc.collect()
            peaks[side.name] = PeakMemory(bench.device)
            seconds, works[side.name] = _prepare(bench, side)
            peaks[side.name].end_preparation()
            figures[side.name] = {"unit": case.unit, "amount": case.amount, "ready_seconds": seconds, "seconds": []}
    for turn in range(TURNS):
        for name, work in reversed(works.items()) if turn % 2 else works.items():
            if turn and bench.seconds_left() < 0:
                continue
            with report_failure(bench, case.name, name):
                figures[name]["seconds"].append(measure_seconds(work, bench.device))
    for side in sides:
        if side.name in works and figures[side.name]["seconds"]:
            with report_failure(bench, case.name, side.name):
                figures[side.name]["peak_bytes"] = peaks[side.name].measure(works[side.name])
                steps = side.steps() if side.steps is not None else case.steps
                figures[side.name] |= {"steps": steps, "limit": case.limit}
                figures[side.name] |= _count(bench, case, side, works[side.name], steps)
                bench.report(case.name, side.name, **figures[side.name])
    works.clear()
    clear_memory()


def _prepare(bench: Bench, side: Side) -> tuple[float, Run]:
    """Return the seconds of preparation and first run, which compiles or captures, and the work of a side."""
    began = time.perf_counter()
    work = side.prepare()
    work()
    measure_seconds(work, bench.device)  # the second run captures
    return time.perf_counter() - began, work


def _count(bench: Bench, case: Case, side: Side, work: Run, steps: int) -> dict[str, Any]:
    if not side.is_profiled or bench.seconds_left() < 0:
        return {}
    counts: dict[str, Any] = count_work(work, bench.device).divide(steps)
    if case.names_functions and side.name.startswith("clearhead"):
        counts["functions"] = longest_functions(work, bench.device)
    return counts


@contextlib.contextmanager
def report_failure(bench: Bench, case: str, side: str) -> Iterator[None]:
    """Report an error inside the context as the failure of a side."""
    try:
        yield
    except FAILURES as error:
        lines = str(error).strip().splitlines() or [""]
        bench.report(case, side, failure=f"{type(error).__name__}: {lines[0][:200]}")
        clear_memory()


def clear_memory() -> None:
    """Free the memory of sides that are done, and forget compiled graphs."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
