"""Counters of `gpu_speed.py`: seconds, memory, launches, host reads, copies and Python functions of some work.

Work is a function without arguments. The same functions count on a CPU, where an operation of PyTorch stands for a
launch.
"""

from __future__ import annotations

import cProfile
import pstats
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from side_by_side import memory
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Run = Callable[[], object]
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")
"""Operations that read a tensor on the host. On a GPU PyTorch reports such reads itself."""
ATTENTION = ("flash", "fmha", "attention", "sdpa")
"""Words in the names of attention kernels."""
LONGEST_FUNCTIONS = 10


@dataclass(frozen=True)
class WorkCounts:
    """Launches, reads, copies and kernel time of some work, from the profiler of PyTorch.

    Args:
        launches: kernels and graphs that the host starts; on a CPU the operations.
        host_reads: reads of a tensor by the host, each of which waits for the device.
        waits: explicit waits for a stream, an event or the device.
        copies: copies between host and device, or within the device.
        busy_seconds: the sum of the kernels' seconds on the device; 0 on a CPU.
        attention_kernels: the names of the attention kernels with their numbers of calls.
    """

    launches: float
    host_reads: float
    waits: float
    copies: float
    busy_seconds: float
    attention_kernels: dict[str, float] = field(default_factory=dict)

    def divide(self, steps: float) -> dict[str, Any]:
        """Return the counts per step."""
        record = asdict(self)
        kernels = record.pop("attention_kernels")
        scaled = {name: value / max(1.0, steps) for name, value in record.items()}
        return scaled | {"attention_kernels": {name: count / max(1.0, steps) for name, count in kernels.items()}}

    def subtract(self, other: WorkCounts) -> WorkCounts:
        """Return the counts of the longer of two runs without those of the shorter one."""
        numbers = {
            name: max(0.0, getattr(self, name) - getattr(other, name))
            for name in ("launches", "host_reads", "waits", "copies", "busy_seconds")
        }
        kernels = Counter(self.attention_kernels)
        kernels.subtract(other.attention_kernels)
        return WorkCounts(**numbers, attention_kernels=dict(+kernels))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure_seconds(run: Run, device: torch.device) -> float:
    """Return the seconds of some work, including its work on the device."""
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def count_work(run: Run, device: torch.device) -> WorkCounts:
    """Do some work under the profiler and return its counts."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    synchronize(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with profile(activities=activities) as profiler:
            set_sync_warnings(device, "warn")
            run()
            set_sync_warnings(device, "default")
            synchronize(device)
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    counts, kernels, busy = Counter[str](), Counter[str](), 0
    for event in results.events() if results is not None else ():
        name = event.name()
        if event.device_type() == DeviceType.CPU:
            counts[name] += 1
        elif not event.is_user_annotation():
            busy += event.duration_ns()
            if any(word in name.lower() for word in ATTENTION):
                kernels[name[:80]] += 1
    reads = sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
    if device.type != "cuda":
        return WorkCounts(
            sum(count for name, count in counts.items() if name.startswith("aten::")),
            sum(counts[name] for name in READS), 0, counts["aten::_to_copy"], 0.0,
            dict(Counter({name: count for name, count in counts.items() if "attention" in name})),
        )  # fmt: skip
    return WorkCounts(
        _sum_of(counts, LAUNCHES), reads, _sum_of(counts, WAITS), _sum_of(counts, ("cudaMemcpy",)), busy / 1e9,
        dict(kernels),
    )  # fmt: skip


def _sum_of(counts: Counter[str], beginnings: Sequence[str]) -> int:
    return sum(count for name, count in counts.items() if name.startswith(tuple(beginnings)))


def set_sync_warnings(device: torch.device, mode: str) -> None:
    """Let PyTorch warn of each operation that waits for a GPU ("warn"), or not ("default")."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def longest_functions(run: Run, device: torch.device) -> list[dict[str, Any]]:
    """Return the Python functions with the longest own times in some work, longest first, in seconds."""
    profiler = cProfile.Profile()
    profiler.enable()
    run()
    synchronize(device)
    profiler.disable()
    rows = pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    longest = sorted(rows, key=lambda row: -row[1][2])[:LONGEST_FUNCTIONS]
    return [
        {"function": f"{Path(file).name}:{line} {name}", "calls": values[1], "seconds": values[2]}
        for (file, line, name), values in longest
    ]


class PeakMemory:
    """Peak memory of a side that shares its process with others; on a CPU that of the whole process.

    Args:
        device: the device whose memory is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before = self._read_allocated()
        self._resident = 0

    def end_preparation(self) -> None:
        """Note the memory that the side keeps, after it was prepared and run once."""
        self._resident = self._read_allocated() - self._before

    def measure(self, run: Run) -> int:
        """Do some work and return the bytes of the side at its peak: what it keeps, and what the work needs."""
        if self.device.type != "cuda":
            run()
            return memory()[1]
        torch.cuda.reset_peak_memory_stats(self.device)
        before = self._read_allocated()
        run()
        synchronize(self.device)
        return self._resident + torch.cuda.max_memory_allocated(self.device) - before

    def _read_allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
