"""Checks before the first step: report now what would fail later, and forecast what the run costs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import nn

from clearhead.base.commands import quote
from clearhead.base.errors import InputError
from clearhead.base.machine import free_memory, refuse_memory
from clearhead.base.printing import human_bytes, num_parameters
from clearhead.core import build
from clearhead.generate.batching import device_of
from clearhead.spec import Model
from clearhead.spec.cost import FP32_BYTES, OPTIMIZER_SLOTS, TRAINING_BYTES
from clearhead.spec.describe import number_of
from clearhead.training.dry_run import StepCost, Workload, memory_in_use, step_cost
from clearhead.training.parallel.processes import Process
from clearhead.training.progress.reports import duration
from clearhead.training.protocols import BatchT
from clearhead.training.settings import TrainSettings, num_snapshots, planned_steps, weight_bytes

ALONE: Final = Process()
CHECKPOINT_SPEED: Final = 2e8
"""Bytes of a checkpoint that are written, synced and hashed in a second, roughly."""
PLOT_BYTES: Final = 60_000_000
"""What the plots take: matplotlib is imported for the first of them."""

_SMALLER_BATCHES: Final = "lower train.batch_tokens and raise train.accumulate instead"


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
        init: the trained model that the run starts from; empty: none.
    """

    name: str
    largest_id: int
    vocabulary_rows: int
    longest: int
    max_positions: int | None
    special_ids: Mapping[str, int]
    init: str = ""


@dataclass(frozen=True)
class Preflight:
    """A forecast of the cost of a run.

    Attributes:
        parameters: number of trained parameters.
        checkpoint_bytes: size of one checkpoint.
        snapshots: how many are kept at most, and how many the run file asks for.
        disk_bytes: size of everything that is kept at one time.
        disk_free: free space on the disk of the run directory, and the space that the run already uses.
        memory_bytes: the peak of memory, with what the data of the run holds now.
        memory_free: memory that is free, with what the data of the run holds now.
        cost: of one step and one validation.
        steps: the last step; None if it is not known.
        validations: how many there are in these steps.
        seconds: the time of the run, with validations and checkpoints; None if the number of steps is not known.
        limit: the seconds after which the run ends early; None without such a limit.
    """

    parameters: int
    checkpoint_bytes: int
    snapshots: tuple[int, int]
    disk_bytes: int
    disk_free: int
    memory_bytes: int
    memory_free: int
    cost: StepCost
    steps: int | None
    validations: int
    seconds: float | None
    limit: float | None

    def lines(self) -> list[str]:
        """Return the forecast as lines of text."""
        total = ""
        if self.seconds is not None:
            counts = f"{number_of(self.steps or 0, 'step')} with {number_of(self.validations, 'validation')}"
            total = f"; {duration(self.seconds)} for {counts}"
            if self.limit is not None and self.limit < self.seconds:
                total += f", which train.seconds ends after {duration(self.limit)}"
        kept, asked = self.snapshots
        fewer = f"snapshots   {kept} and not {asked}, because of train.snapshot_megabytes"
        return [
            f"parameters  {self.parameters:,}",
            f"memory      about {human_bytes(self.memory_bytes)} of {human_bytes(self.memory_free)} free",
            f"disk        {human_bytes(self.checkpoint_bytes)} a checkpoint, up to {human_bytes(self.disk_bytes)} in "
            f"all, of {human_bytes(self.disk_free)} free",
            *([fewer] if kept < asked else []),
            f"time        about {duration(self.cost.step_seconds)} a step, "
            f"{duration(self.cost.validation_seconds)} a validation{total}",
        ]


def refuse_large(
    model: Model, device: torch.device, *, is_trained_whole: bool, process: Process = ALONE, is_sharded: bool = False
) -> None:
    """Refuse a model that does not fit into memory with what its training needs at least, before it is built.

    Args:
        model: its spec.
        device: on which it will be trained.
        is_trained_whole: each weight has a gradient and the two moments of an optimizer.
        process: this one among all that train.
        is_sharded: whether they share the model.

    Raises:
        InputError: it does not fit.
    """
    count = num_parameters(build(model, device="meta"))
    needed = least_memory(count, is_trained_whole=is_trained_whole) // (process.size if is_sharded else 1)
    advice = "lower model.layers or model.width"
    if process.size > 1 and not is_sharded:
        advice += ", or share the model among the processes with train.parallel = 'fsdp'"
    free = free_for_each(device, process.local_size)
    refuse_memory(needed, f"Training {count:,} parameters", free=free, advice=advice)


def least_memory(count: int, *, is_trained_whole: bool) -> int:
    """Return the bytes that the training of so many parameters needs at least."""
    return count * (TRAINING_BYTES if is_trained_whole else FP32_BYTES)


def free_for_each(device: torch.device, processes_here: int) -> int:
    """Return the bytes of memory that each process of this machine can still take: GPUs have their own."""
    return free_memory(device) // (1 if device.type == "cuda" else processes_here)


def preflight(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    work: Workload[BatchT],
    settings: TrainSettings,
    *,
    sides: Sequence[TokenSide],
    memory_before: int | None = None,
    process: Process = ALONE,
) -> Preflight:
    """Check a run before its first step and forecast its cost, without changing anything.

    Args:
        module: what will be trained.
        optimizer: over its parameters, without a state yet.
        work: what the run computes.
        settings: of the run.
        sides: the sides of the data.
        memory_before: what the process held before it read the data, by `memory_in_use`; None: what it holds now.
        process: this one; the others of its machine take as much memory.

    Raises:
        InputError: every fault, in one report.
    """
    faults = [fault for side in sides for fault in side_faults(side)]
    run = Path(settings.run)
    checkpoint_bytes, disk_bytes = disk_forecast(module, settings)
    disk_free = _free_disk(run)
    if disk_bytes > disk_free:
        faults.append(
            f"The checkpoints need up to {human_bytes(disk_bytes)}, but the disk of {settings.run} has "
            f"{human_bytes(disk_free)} free: free some space, or lower train.keep, train.average or train.snapshots."
        )
    if faults:
        # Ids outside the vocabulary would fail inside the dry step, with a worse message.
        raise InputError.from_faults(faults, subject="the run")
    held = 0 if memory_before is None else max(0, memory_in_use(device_of(module)) - memory_before)
    memory_free = free_for_each(device_of(module), process.local_size) + held
    cost = step_cost(module, optimizer, work, settings, is_alone=process.size == 1)
    # A checkpoint is copied once while it is written.
    memory = held + cost.memory_bytes + checkpoint_bytes + (PLOT_BYTES if settings.plots else 0)
    refuse_memory(memory, "Training", free=memory_free, advice=_SMALLER_BATCHES)
    steps = planned_steps(settings, work.batches.batches_per_epoch)
    validations = -(-steps // settings.validate_every) if steps is not None else 0
    saved = replace(cost, validation_seconds=cost.validation_seconds + checkpoint_bytes / CHECKPOINT_SPEED)
    return Preflight(
        parameters=num_parameters(module, only_trained=True),
        checkpoint_bytes=checkpoint_bytes,
        snapshots=(num_snapshots(settings, module), settings.snapshots),
        disk_bytes=disk_bytes,
        disk_free=disk_free,
        memory_bytes=memory,
        memory_free=memory_free,
        cost=saved,
        steps=steps,
        validations=validations,
        seconds=saved.step_seconds * steps + saved.validation_seconds * validations if steps is not None else None,
        limit=settings.seconds,
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
            f"lower data.max_length to {side.max_positions}, or {_more_positions(side.init, side.longest)}."
        )
    for role, token_id in side.special_ids.items():
        if not 0 <= token_id < side.vocabulary_rows:
            faults.append(
                f"The {side.name} id for {role} is {token_id}, but the model's vocabulary has the rows 0 to "
                f"{side.vocabulary_rows - 1}."
            )
    return faults


def _more_positions(init: str, longest: int) -> str:
    """Say how a model gets more positions: in the run file, or, where one is trained further, before the run."""
    if not init:
        return "raise model.max_positions"
    saved = f"{Path(init.partition('@')[0]).name}-{longest}"
    code = f"import clearhead as ch; ch.surgery.resize_positions(ch.load({init!r}), {longest}).model.save({saved!r})"
    return (
        f"give {init} more of them with: {quote(sys.executable)} -c {quote(code)} - and then train with "
        f"{quote(f'task.init={saved}')}"
    )


def disk_forecast(module: nn.Module, settings: TrainSettings) -> tuple[int, int]:
    """Return the bytes of one checkpoint, and of everything that a run keeps at one time."""
    weights = weight_bytes(module)
    trained = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    checkpoint = weights * (1 + (settings.ema is not None)) + trained * OPTIMIZER_SLOTS
    # The last checkpoints, the best one, and the one being written before an old one is deleted.
    kept = checkpoint * (settings.keep + 2)
    averaging = weights * (settings.average + 1) if settings.average else 0
    return checkpoint, kept + averaging + weights * num_snapshots(settings, module)


def _free_disk(run: Path) -> int:
    folder = run / "checkpoints"
    status = [path.stat() for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    # By inode, because recent weights are hard links to those of the checkpoints.
    held = sum({entry.st_ino: entry.st_size for entry in status}.values())
    return shutil.disk_usage(run).free + held
