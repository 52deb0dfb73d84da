"""Checks and forecasts before the first step: faults of data and disk, and the time and memory of a step."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Generic, Literal

import torch
from torch import Tensor, nn

from clearhead.base.errors import InputError
from clearhead.base.machine import choose_precision, free_memory, refuse_memory
from clearhead.base.printing import human_bytes, num_parameters
from clearhead.core import build
from clearhead.data.batches.base import Batches, BatchT
from clearhead.fast.probe import has_fast_bf16
from clearhead.fast.training.parts import training_tree
from clearhead.generate.batching import device_of
from clearhead.spec import Model
from clearhead.spec.cost import FP32_BYTES, OPTIMIZER_SLOTS, TRAINING_BYTES
from clearhead.spec.describe import number_of
from clearhead.training.memory import (
    is_out_of_memory,
    memory_in_use,
    needs_kernels,
    peak_memory,
    return_memory,
    size_of,
    start_peak,
)
from clearhead.training.optim.optimizers import scale_gradients
from clearhead.training.parallel.world import ALONE, Process
from clearhead.training.progress.reports import duration
from clearhead.training.random_state import deterministic_algorithms, preserved_random_state, restored_threads
from clearhead.training.record import TrainSettings, num_snapshots, planned_steps, weight_bytes
from clearhead.training.runfile.sections import Train

CHECKPOINT_SPEED: Final = 2e8
"""Bytes of a checkpoint that are written, synced and hashed in a second, roughly."""
PLOT_BYTES: Final = 60_000_000
"""What the plots take: matplotlib is imported for the first of them."""

_SMALLER_BATCHES: Final = "lower train.batch_tokens and raise train.accumulate instead"


@dataclass(frozen=True)
class StepCost:
    """The cost of training on this machine, as a few steps without effect show it.

    Attributes:
        step_seconds: one step: an average batch, or as many as are accumulated, and the optimizer.
        validation_seconds: one validation.
        memory_bytes: the peak of memory, less the memory in use before: activations, gradients, optimizer states.
    """

    step_seconds: float
    validation_seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class Workload(Generic[BatchT]):
    """The computation of a run: loss and batches, with the sizes that its cost depends on.

    Attributes:
        loss: gives, for a batch, the summed loss and the number of labels.
        batches: the training batches.
        largest: the training batch with the most positions; None: any.
        num_sizes: different numbers of padded tokens that the stacks read in an epoch.
        valid_share: size of the validation data, as a share of the training data.
        score_seconds: called with the module in evaluation mode, returns the seconds that a score takes beside the
            validation loss; None: the score comes with the loss.
        reading_seconds: that a batch of a streamed text takes to be read and tokenized, on average.
    """

    loss: Callable[[nn.Module, BatchT], tuple[Tensor, int]]
    batches: Batches[BatchT]
    largest: BatchT | None = None
    num_sizes: int = 1
    valid_share: float = 0.0
    score_seconds: Callable[[nn.Module], float] | None = None
    reading_seconds: float = 0.0


@dataclass(frozen=True)
class Trial(Generic[BatchT]):
    """A training whose cost is measured before its first step.

    Attributes:
        module: the module to train.
        optimizer: over the parameters of the module, without a state yet.
        work: the workload of the run.
        settings: of the run.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    work: Workload[BatchT]
    settings: TrainSettings


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
    trial: Trial[BatchT],
    *,
    faults: Sequence[str] = (),
    memory_before: int | None = None,
    process: Process = ALONE,
) -> Preflight:
    """Check a run before its first step and forecast its cost, without changing anything.

    Args:
        trial: the run.
        faults: messages about data that does not fit the module.
        memory_before: `memory_in_use` before the data was read, in bytes; None: the present use.
        process: this process; the others of its machine take as much memory.

    Raises:
        InputError: every fault, in one report.
    """
    module, settings, every_fault = trial.module, trial.settings, list(faults)
    run = Path(settings.run)
    checkpoint_bytes, disk_bytes = disk_forecast(module, settings)
    disk_free = _free_disk(run) if process.rank == 0 else disk_bytes  # the first process writes
    if disk_bytes > disk_free:
        every_fault.append(
            f"The checkpoints need up to {human_bytes(disk_bytes)}, but the disk of {settings.run} has "
            f"{human_bytes(disk_free)} free: free some space, or lower train.keep, train.average or train.snapshots."
        )
    if every_fault:
        # Ids outside the vocabulary would fail inside the dry step, with a worse message.
        raise InputError.from_faults(every_fault, subject="the run")
    held = 0 if memory_before is None else max(0, memory_in_use(device_of(module)) - memory_before)
    memory_free = free_for_each(device_of(module), process.local_size) + held
    cost = step_cost(trial, is_alone=process.size == 1)
    # A checkpoint is copied once while it is written.
    memory = held + cost.memory_bytes + checkpoint_bytes + (PLOT_BYTES if settings.plots else 0)
    refuse_memory(memory, "Training", free=memory_free, advice=_SMALLER_BATCHES)
    steps = planned_steps(settings, trial.work.batches.batches_per_epoch)
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


LEAST_SIZES: Final = 4
"""So many sizes of batches are tried at least where each needs kernels of its own."""
MOST_BATCHES: Final = 8
"""So many batches are tried at most: enough for an average."""
LEAST_PRODUCTS: Final = 2**30
"""With fewer products of a weight and a token in a batch, no precision is worth a trial on a CPU."""
MOST_TIMES: Final = 3
"""A thing is timed so often at most, and the least taken: what else runs on the machine only adds to a time."""
WORTHWHILE: Final = 0.9
"""bf16 is chosen where its time is at most this share of that of fp32."""


def step_cost(trial: Trial[BatchT], *, seconds: float = 0.8, is_alone: bool = True) -> StepCost:
    """Measure the cost of training by steps without effect on module, optimizer and random states.

    Args:
        trial: the training.
        seconds: no further batch is tried after this time; each thing is timed twice at least.
        is_alone: whether no other process takes part in each step; several processes time each thing once.

    Raises:
        InputError: the largest batch does not fit into memory.
    """
    module, optimizer, work, settings = trial.module, trial.optimizer, trial.work, trial.settings
    assert not optimizer.state, "an optimizer with a state would lose it"
    device, batches_state, began = device_of(module), work.batches.state(), time.perf_counter()
    dry = _DryRun(module, work.loss, device, settings.precision, is_alone=is_alone)
    with preserved_random_state(), restored_threads(), deterministic_algorithms(), _restored_module(module):
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        before = start_peak(device)
        left = seconds - (time.perf_counter() - began) if is_alone else 0.0
        passes, batch, peak = dry.passes(work, seconds=left, most=MOST_BATCHES if is_alone else 1)
        one_batch = sum(passes) / len(passes) + work.reading_seconds
        validation = dry.least(partial(dry.forward, batch), seconds) * work.valid_share * work.batches.batches_per_epoch
        if work.score_seconds is not None:
            validation += dry.score(work.score_seconds)
        peak = max(peak, peak_memory(device))
        update = dry.update(optimizer, clip=settings.clip, seconds=seconds)
        memory = max(peak + dry.state_bytes, peak_memory(device)) - before
    work.batches.load_state(batches_state)
    if settings.ema is not None:
        memory += sum(map(size_of, module.parameters()))
    return StepCost(one_batch * settings.accumulate + update, validation, memory)


def faster_precision(module: nn.Module, work: Workload[BatchT], train: Train) -> Literal["fp32", "bf16"]:
    """Return the precision of a run: where "auto" is asked for on a CPU that multiplies bf16, what a trial shows.

    The trial is two passes of one batch forward and backward in either precision, of which the faster one counts, after
    one that chooses kernels. It has no effect.

    Args:
        module: what will be trained.
        work: what the run computes.
        train: the settings of the run.

    Raises:
        InputError: a batch does not fit into memory.
    """
    device, batches_state = device_of(module), work.batches.state()
    chosen = choose_precision(train.precision, device)
    if train.precision != "auto" or device.type != "cpu" or not has_fast_bf16(device):
        return chosen
    batch = next(work.batches)
    if batch.num_tokens * num_parameters(module) >= LEAST_PRODUCTS:
        with preserved_random_state(), restored_threads(), deterministic_algorithms(), _restored_module(module):
            if train.threads is not None:
                torch.set_num_threads(train.threads)
            tries = {}
            for name in ("fp32", "bf16"):
                tree = training_tree(module, name, recomputes_layers=train.activation_checkpointing)
                tries[name] = _DryRun(tree, work.loss, device, name)
            for dry in tries.values():
                dry.forward_backward(batch)
            spent = {name: dry.least(partial(dry.forward_backward, batch), 0.0) for name, dry in tries.items()}
        return_memory(0, device, "bf16")  # which the kernels of the other precision took
        chosen = "bf16" if spent["bf16"] <= WORTHWHILE * spent["fp32"] else "fp32"
    work.batches.load_state(batches_state)
    return chosen


@dataclass
class _DryRun(Generic[BatchT]):
    """Parts of a step, timed; the module's weights stay as they are.

    Attributes:
        peak: of memory, seen within a pass.
        state_bytes: size of the optimizer's state, which a real pass finds in memory.
    """

    module: nn.Module
    loss: Callable[[nn.Module, BatchT], tuple[Tensor, int]]
    device: torch.device
    precision: str
    is_alone: bool = True
    peak: int = 0
    state_bytes: int = 0

    def least(self, timed: Callable[[], float], seconds: float) -> float:
        """Return the least of the times of one thing: two at least, more while not so many seconds are spent."""
        times = [timed()]
        while self.is_alone and (len(times) < 2 or (len(times) < MOST_TIMES and sum(times) < seconds)):
            times.append(timed())
        return min(times)

    def forward_backward(self, batch: BatchT) -> float:
        """Return the seconds of a forward and backward pass."""
        self.module.train()
        self.module.zero_grad(set_to_none=True)
        began = time.perf_counter()
        try:
            total, _ = self._loss(batch)
            # Here all activations are in memory, which matters where the system reports no peak.
            self.peak = max(self.peak, peak_memory(self.device))
            total.backward()
            return self._since(began)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise InputError(
                f"The largest batch ({batch.num_tokens} tokens) does not fit into memory: lower train.batch_tokens "
                "and raise train.accumulate instead."
            ) from error

    def passes(self, work: Workload[BatchT], *, seconds: float, most: int) -> tuple[list[float], BatchT, int]:
        """Try the largest batch, and others while there is time.

        Returns:
            the seconds of each of the others, the last of them, and the peak of memory once all sizes were read.
        """
        began, needs_all = time.perf_counter(), needs_kernels(self.device, self.precision)
        batch = next(work.batches) if work.largest is None else work.largest
        self.forward_backward(batch)
        self.peak, held = max(self.peak, peak_memory(self.device)), memory_in_use(self.device)
        first, sizes, taken = len(_sizes(batch)), _sizes(batch), list[float]()
        least = min(LEAST_SIZES, work.num_sizes) if needs_all else 1
        while len(taken) < most and (not taken or len(sizes) < least or time.perf_counter() - began < seconds):
            fetched = time.perf_counter()
            batch = next(work.batches)
            fetching = time.perf_counter() - fetched
            sizes |= _sizes(batch)
            # The first pass of a size chooses kernels as well.
            taken.append(fetching + self.least(partial(self.forward_backward, batch), 0.0))
        peak = max(self.peak, peak_memory(self.device))
        if needs_all and len(sizes) > first:
            grown = max(0, memory_in_use(self.device) - held)  # as much for each size that was not tried
            peak = max(peak, self.peak + grown * max(1, work.num_sizes - first) // (len(sizes) - first))
        return taken, batch, peak

    def forward(self, batch: BatchT) -> float:
        """Return the seconds of a forward pass as in a validation."""
        self.module.eval()
        with torch.no_grad():
            began = time.perf_counter()
            self._loss(batch)
            return self._since(began)

    def score(self, seconds: Callable[[nn.Module], float]) -> float:
        """Return the seconds of the score of a validation."""
        self.module.eval()
        with torch.no_grad(), self._autocast():
            return seconds(self.module)

    def update(self, optimizer: torch.optim.Optimizer, *, clip: float | None, seconds: float) -> float:
        """Return the seconds of an update by the optimizer, whose state is empty again afterwards.

        A learning rate of 0 and gradients of 0 leave every bit of the weights as it is.
        """
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        torch._foreach_zero_(gradients)
        optimizer.step()  # the first update makes the state
        values = [value for state in optimizer.state.values() for value in state.values()]
        self.state_bytes = sum(size_of(value) for value in values if isinstance(value, Tensor))

        def timed() -> float:
            began = time.perf_counter()
            scale_gradients(self.module.parameters(), 1.0, max_norm=clip)
            optimizer.step()
            return self._since(began)

        spent = self.least(timed, seconds)
        optimizer.state.clear()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return spent

    def _loss(self, batch: BatchT) -> tuple[Tensor, int]:
        with self._autocast():
            return self.loss(self.module, batch)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def _since(self, began: float) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter() - began


def _sizes(batch: object) -> set[int]:
    """Return the numbers of padded tokens that the stacks read."""
    return {value.numel() for value in vars(batch).values() if isinstance(value, Tensor) and value.dim() == 2}


@contextlib.contextmanager
def _restored_module(module: nn.Module) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    modes = [(submodule, submodule.training) for submodule in module.modules()]
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
        for submodule, training in modes:
            submodule.training = training
