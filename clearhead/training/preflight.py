"""Checks before the first step: report now what would fail later, and forecast what the run costs."""

from __future__ import annotations

import contextlib
import gc
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import torch
from torch import Tensor, nn

from clearhead.errors import InputError
from clearhead.training.progress.reports import duration
from clearhead.training.protocols import BatchT
from clearhead.training.random_state import deterministic_algorithms, preserved_random_state
from clearhead.training.settings import TrainSettings, planned_steps

OPTIMIZER_SLOTS: Final = 2
"""Values that an optimizer of the Adam family keeps for each parameter: two moments of the gradient."""


@dataclass(frozen=True)
class TokenSide:
    """One side of the training data and the limits of the module.

    Attributes:
        name: "source" or "target", for the messages.
        largest_id: the largest token id in the data.
        vocabulary_rows: rows of the module's embedding table.
        longest: tokens of the longest sequence, with special tokens.
        max_positions: the longest sequence that the module can read, or None for no limit.
        special_ids: ids of the special tokens by role, such as "pad" and "eos".
    """

    name: str
    largest_id: int
    vocabulary_rows: int
    longest: int
    max_positions: int | None
    special_ids: Mapping[str, int]


@dataclass(frozen=True)
class DryStep:
    """The cost of one forward and backward pass.

    Attributes:
        seconds: time of the pass.
        peak_bytes: peak memory, less the memory in use before.
        tokens: source and target tokens of the batch.
    """

    seconds: float
    peak_bytes: int
    tokens: int


@dataclass(frozen=True)
class Preflight:
    """A forecast of the cost of a run.

    Attributes:
        parameters: number of trained parameters.
        checkpoint_bytes: size of one checkpoint.
        disk_bytes: size of everything that is kept at one time.
        disk_free: free space on the disk of the run directory, and the space that the run already uses.
        memory_bytes: memory needed in addition to what is in use now.
        memory_free: memory that is free now.
        step_seconds: time of a step with an average batch.
        seconds: time of all steps without validations, or None if the number of steps is not known.
    """

    parameters: int
    checkpoint_bytes: int
    disk_bytes: int
    disk_free: int
    memory_bytes: int
    memory_free: int
    step_seconds: float
    seconds: float | None

    def lines(self) -> list[str]:
        """Return the forecast as lines of text."""
        total = f", {duration(self.seconds)} for all steps without validations" if self.seconds is not None else ""
        return [
            f"parameters  {self.parameters:,}",
            f"memory      about {size(self.memory_bytes)} of {size(self.memory_free)} free",
            f"disk        {size(self.checkpoint_bytes)} a checkpoint, up to {size(self.disk_bytes)} in all, "
            f"of {size(self.disk_free)} free",
            f"time        about {duration(self.step_seconds)} a step{total}",
        ]


def preflight(
    module: nn.Module,
    loss: Callable[[nn.Module, BatchT], tuple[Tensor, int]],
    largest: BatchT,
    settings: TrainSettings,
    *,
    sides: Sequence[TokenSide],
    mean_tokens: float,
    batches_per_epoch: int,
) -> Preflight:
    """Check a run before its first step and forecast its cost, without changing anything.

    Args:
        module: what will be trained.
        loss: gives, for a batch, the summed loss and the number of labels.
        largest: the training batch with the most positions.
        settings: of the run.
        sides: the sides of the data.
        mean_tokens: source and target tokens of an average batch.
        batches_per_epoch: batches in one pass over the training data.

    Raises:
        InputError: every fault, in one report.
    """
    faults = [fault for side in sides for fault in side_faults(side)]
    run = Path(settings.run)
    checkpoint_bytes, disk_bytes = disk_forecast(module, settings)
    disk_free = _free_disk(run)
    if disk_bytes > disk_free:
        faults.append(
            f"The checkpoints need up to {size(disk_bytes)}, but the disk of {settings.run} has {size(disk_free)} "
            "free: free some space, or lower train.keep or train.average."
        )
    if faults:
        # Ids outside the vocabulary would fail inside the dry step, with a worse message.
        raise InputError.from_faults(faults, subject="the run")
    dry = dry_step(module, loss, largest, precision=settings.precision)
    trained = sum(_bytes(parameter) for parameter in module.parameters() if parameter.requires_grad)
    memory = dry.peak_bytes + trained * (OPTIMIZER_SLOTS + (settings.ema is not None))
    memory_free = free_memory()
    if memory > memory_free:
        raise InputError(
            f"Training needs about {size(memory)} of memory, but only {size(memory_free)} is free: "
            "lower train.batch_tokens and raise train.accumulate instead."
        )
    step_seconds = dry.seconds * mean_tokens / max(1, dry.tokens) * settings.accumulate
    steps = planned_steps(settings, batches_per_epoch)
    return Preflight(
        parameters=sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad),
        checkpoint_bytes=checkpoint_bytes,
        disk_bytes=disk_bytes,
        disk_free=disk_free,
        memory_bytes=memory,
        memory_free=memory_free,
        step_seconds=step_seconds,
        seconds=step_seconds * steps if steps is not None else None,
    )


def side_faults(side: TokenSide) -> list[str]:
    """Return one message for each way in which a side of the data does not fit the module."""
    faults = []
    if side.largest_id >= side.vocabulary_rows:
        faults.append(
            f"The {side.name} data has the token id {side.largest_id}, but the model's {side.name} vocabulary ends at "
            f"{side.vocabulary_rows - 1}: the data was made with another tokenizer, or the vocabulary is too small."
        )
    if side.max_positions is not None and side.longest > side.max_positions:
        faults.append(
            f"The longest {side.name} has {side.longest} tokens, but the model has {side.max_positions} positions: "
            f"lower data.max_length to {side.max_positions}, or raise model.max_positions."
        )
    for role, token_id in side.special_ids.items():
        if not 0 <= token_id < side.vocabulary_rows:
            faults.append(
                f"The {side.name} id for {role} is {token_id}, but the model's vocabulary has the rows 0 to "
                f"{side.vocabulary_rows - 1}."
            )
    return faults


def disk_forecast(module: nn.Module, settings: TrainSettings) -> tuple[int, int]:
    """Return the bytes of one checkpoint, and of everything that a run keeps at one time."""
    unique = {(tensor.data_ptr(), tensor.shape): _bytes(tensor) for tensor in module.state_dict().values()}
    weights = sum(unique.values())
    trained = sum(_bytes(parameter) for parameter in module.parameters() if parameter.requires_grad)
    checkpoint = weights * (1 + (settings.ema is not None)) + trained * OPTIMIZER_SLOTS
    # The last checkpoints, the best one, and the one being written before an old one is deleted.
    kept = checkpoint * (settings.keep + 2)
    averaging = weights * (settings.average + 1) if settings.average else 0
    return checkpoint, kept + averaging


def dry_step(
    module: nn.Module,
    loss: Callable[[nn.Module, BatchT], tuple[Tensor, int]],
    batch: BatchT,
    *,
    precision: str = "fp32",
) -> DryStep:
    """Measure time and memory of a forward and backward pass; module and random states are the same afterwards.

    Args:
        module: what will be trained; its gradients, buffers and mode are restored.
        loss: gives, for a batch, the summed loss and the number of labels.
        batch: the batch to try.
        precision: "fp32", or "bf16" for autocast.

    Raises:
        InputError: the batch does not fit into memory.
    """
    device = next(module.parameters()).device
    with preserved_random_state(), deterministic_algorithms(), _restored_module(module):
        module.train()
        before = peak = _start_peak(device)
        seconds = []
        try:
            # Twice: the first pass includes allocation and the choice of kernels.
            for _ in range(2):
                module.zero_grad(set_to_none=True)
                began = time.perf_counter()
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
                    total, _ = loss(module, batch)
                # Here all activations are in memory, which matters where the system reports no peak.
                peak = max(peak, _peak(device))
                total.backward()
                del total
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
                peak = max(peak, _peak(device))
                seconds.append(time.perf_counter() - began)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise InputError(
                    f"The largest batch ({batch.num_tokens} tokens) does not fit into memory: lower train.batch_tokens "
                    "and raise train.accumulate instead."
                ) from error
            raise
        return DryStep(min(seconds), peak - before, batch.num_tokens)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch ran out of memory, on an accelerator or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def free_memory() -> int:
    """Return the bytes of main memory that this process can still take, within the limit of its container."""
    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text(encoding="ascii") for name in ("memory.max", "memory.current"))
        free = min(free, max(0, int(limit) - int(used)))
    return free


def size(count: int) -> str:
    """Return a number of bytes with its unit: "512 B", "41.7 MB", "1.2 GB"."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


@contextlib.contextmanager
def _restored_module(module: nn.Module) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    modes = [(part, part.training) for part in module.modules()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for part, training in modes:
            part.training = training


def _start_peak(device: torch.device) -> int:
    """Reset the peak of the memory in use, and return the present use in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    gc.collect()  # garbage that is freed during the step would hide as much of its memory
    with contextlib.suppress(OSError):
        # Linux: resets the peak of this process
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak(device)


def _peak(device: torch.device) -> int:
    """Return the peak of the memory in use; the present use where the system reports no peak."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    with contextlib.suppress(OSError, IndexError, ValueError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    memory = psutil.Process().memory_info()
    return int(getattr(memory, "peak_wset", memory.rss))


def _free_disk(run: Path) -> int:
    own = run / "checkpoints"
    status = [path.stat() for path in own.rglob("*") if path.is_file()] if own.is_dir() else []
    # By inode, because recent weights are hard links to those of the checkpoints.
    held = sum({entry.st_ino: entry.st_size for entry in status}.values())
    return shutil.disk_usage(run).free + held


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
