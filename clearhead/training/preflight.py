"""Checks before the first step: faults of data and disk, and a forecast of time, memory and disk space."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Generic, Literal, cast

import torch
from torch import Tensor, nn

from clearhead.base.errors import InputError, is_out_of_memory
from clearhead.base.machine import choose_precision, free_memory, refuse_memory
from clearhead.base.printing import human_bytes, num_parameters
from clearhead.base.progress import SILENT, Display
from clearhead.checkpoints.weights.lora import find_merged_dtypes
from clearhead.core import Transformer, build
from clearhead.data.batches.base import Batch, Batches, BatchT
from clearhead.fast.memory import MemoryForecast, forecast_memory
from clearhead.fast.probe import has_fast_bf16
from clearhead.fast.stored import StorageFormat
from clearhead.fast.training.tree import training_tree
from clearhead.generate.batching import device_of
from clearhead.spec import Model
from clearhead.spec.cost import FP32_BYTES, OPTIMIZER_SLOTS, TRAINING_BYTES
from clearhead.spec.describe import count_noun
from clearhead.training.memory import (
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
from clearhead.training.random_state import deterministic_algorithms, preserve_random_state, preserve_threads
from clearhead.training.record import TrainSettings, num_snapshots, planned_steps, weight_bytes
from clearhead.training.runfile.sections import Train
from clearhead.training.slowdowns import NOTABLE, Slowdown, find_suspects

CHECKPOINT_SPEED: Final = 2e8
"""Rough speed of writing, syncing and hashing a checkpoint, in bytes per second."""
PLOT_BYTES: Final = 60_000_000
"""Memory of the plots in bytes; the first plot imports matplotlib."""

LARGE_MODEL: Final = 50_000_000
"""Bytes of weights from which the memory of the trained model is forecast for each precision."""
_SMALLER_BATCHES: Final = "lower train.batch_tokens and raise train.accumulate instead"


@dataclass(frozen=True)
class StepCost:
    """The cost of training on this machine, measured with a few steps that change nothing.

    Attributes:
        step_seconds: the time of one step in seconds: its batches at average size, and the optimizer update.
        validation_seconds: the time of one validation in seconds.
        memory_bytes: the peak memory use less the use before, in bytes: activations, gradients, optimizer states.
        state_bytes: the size of the optimizer's state in bytes.
        slowdowns: the settings that make a step slower.
    """

    step_seconds: float
    validation_seconds: float
    memory_bytes: int
    state_bytes: int = 0
    slowdowns: Sequence[Slowdown] = ()


@dataclass(frozen=True)
class Workload(Generic[BatchT]):
    """The work of a run: its loss and batches, and the sizes that determine its cost.

    Attributes:
        loss: a function that returns the summed loss of a batch and the number of its labels.
        batches: the training batches.
        largest: the training batch with the most positions. None means that any batch is measured.
        num_sizes: the number of different batch sizes (in padded tokens of a stack) in an epoch.
        valid_share: the size of the validation data, as a share of the training data.
        score_seconds: a function that returns the time in seconds that the score takes in addition to the validation
            loss; called with the module in evaluation mode. None means that the score needs no extra time.
        reading_seconds: the average time in seconds to read and tokenize a batch of a streamed text.
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
        optimizer: the optimizer of the module, still without a state.
        work: the workload of the run.
        settings: the settings of the run.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    work: Workload[BatchT]
    settings: TrainSettings


@dataclass(frozen=True)
class Preflight:
    """A forecast of the cost of a run.

    Attributes:
        parameters: the number of trained parameters.
        checkpoint_bytes: the size of one checkpoint in bytes.
        snapshots: the maximum number of snapshots that the run keeps, and the number that the run file requests.
        disk_bytes: the maximum disk space of the run directory in bytes.
        disk_free: the free disk space plus the space that the run already uses, in bytes.
        memory_bytes: the peak memory use in bytes, including the memory of the data.
        memory_free: the free memory plus the memory of the data, in bytes.
        weights: the bytes of the weights by dtype, such as {"float32": 4_000_000}.
        gradient_bytes: the size of the gradients in bytes.
        forecasts: the memory of the trained model for each precision in which it can be loaded.
        cost: the cost of one step and one validation.
        steps: the last step. None means that it is not known.
        validations: the number of validations in these steps.
        seconds: the time of the run in seconds, with validations and checkpoints. None means that the number of steps
            is not known.
        limit: the time in seconds after which the run ends early. None means no such limit.
    """

    parameters: int
    checkpoint_bytes: int
    snapshots: tuple[int, int]
    disk_bytes: int
    disk_free: int
    memory_bytes: int
    memory_free: int
    weights: Mapping[str, int]
    gradient_bytes: int
    forecasts: Sequence[MemoryForecast]
    cost: StepCost
    steps: int | None
    validations: int
    seconds: float | None
    limit: float | None

    def lines(self) -> list[str]:
        """Return the forecast as lines of text."""
        total = ""
        if self.seconds is not None:
            counts = f"{count_noun(self.steps or 0, 'step')} with {count_noun(self.validations, 'validation')}"
            total = f"; {duration(self.seconds)} for {counts}"
            if self.limit is not None and self.limit < self.seconds:
                total += f"; train.seconds stops the run after {duration(self.limit)}"
        num_kept, num_requested = self.snapshots
        fewer = f"snapshots   {num_kept} and not {num_requested}, because of train.snapshot_megabytes"
        return [
            f"parameters  {self.parameters:,}",
            f"memory      about {human_bytes(self.memory_bytes)} of {human_bytes(self.memory_free)} free",
            *self._memory_lines(),
            f"disk        {human_bytes(self.checkpoint_bytes)} a checkpoint, up to {human_bytes(self.disk_bytes)} in "
            f"all, of {human_bytes(self.disk_free)} free",
            *([fewer] if num_kept < num_requested else []),
            f"time        about {duration(self.cost.step_seconds)} a step, "
            f"{duration(self.cost.validation_seconds)} a validation{total}",
            *(slowdown.line() for slowdown in self.cost.slowdowns),
        ]

    def _memory_lines(self) -> Iterator[str]:
        """Yield lines about the memory of weights, gradients and optimizer, and about a load of the trained model."""
        weights = " and ".join(f"{human_bytes(size)} in {dtype}" for dtype, size in self.weights.items())
        yield (
            f"contents    weights {weights}, gradients {human_bytes(self.gradient_bytes)}, optimizer "
            f"{human_bytes(self.cost.state_bytes)}; the rest is activations, data and a copy for each checkpoint"
        )
        for forecast in self.forecasts:
            yield f"trained     {forecast.precision}: {forecast.summary()}"


def refuse_large(
    model: Model,
    device: torch.device,
    *,
    is_trained_whole: bool,
    formats: Mapping[str, StorageFormat] | None = None,
    process: Process = ALONE,
    is_sharded: bool = False,
) -> None:
    """Refuse a model whose training cannot fit into memory, before the model is built.

    Args:
        model: the spec of the model.
        device: the device for training.
        is_trained_whole, formats: same as in `least_memory`.
        process: this process among all that train together.
        is_sharded: True if the model is sharded over the processes.

    Raises:
        InputError: the memory is too small.
    """
    module = build(model, device="meta")
    count = num_parameters(module)
    needed = least_memory(module, is_trained_whole=is_trained_whole, formats=formats)
    needed //= process.size if is_sharded else 1
    advice = "lower model.layers or model.width"
    if process.size > 1 and not is_sharded:
        advice += ", or share the model among the processes with train.parallel = 'fsdp'"
    free = free_for_each(device, process.local_size)
    refuse_memory(needed, f"Training {count:,} parameters", free=free, advice=advice)


def least_memory(
    module: Transformer, *, is_trained_whole: bool, formats: Mapping[str, StorageFormat] | None = None
) -> int:
    """Return the minimum memory in bytes to train a model.

    Args:
        module: the model, which may be on the meta device.
        is_trained_whole: True if every weight has a gradient and two optimizer moments; False with LoRA.
        formats: the formats of frozen matrices in 16 bits, by the addresses of their modules. None means none.
    """
    count = num_parameters(module)
    if is_trained_whole:
        return count * TRAINING_BYTES
    stored = sum(module.get_parameter(f"{address}.weight").numel() for address in formats or ())
    return (count - stored) * FP32_BYTES + stored * torch.bfloat16.itemsize


def free_for_each(device: torch.device, processes_here: int) -> int:
    """Return the free memory in bytes for each process of this machine; on CUDA each process has its own GPU."""
    return free_memory(device) // (1 if device.type == "cuda" else processes_here)


def preflight(
    trial: Trial[BatchT],
    *,
    faults: Sequence[str] = (),
    memory_before: int | None = None,
    process: Process = ALONE,
    display: Display = SILENT,
) -> Preflight:
    """Check a run before its first step and forecast its cost, without changing model, optimizer or data position.

    The measurements may take a second, `MOST_STEPS` steps or `MOST_SHARE` of the run, whichever is longest.

    Args:
        trial: the training to check.
        faults: the messages about data that does not fit the module.
        memory_before: the result of `memory_in_use` before the data was read, in bytes. None means the current use.
        process: this process; the other processes of its machine take the same memory.
        display: the display that shows a line before each measurement.

    Raises:
        InputError: every fault, in one report.
    """
    module, settings, every_fault = trial.module, trial.settings, list(faults)
    run = Path(settings.run)
    checkpoint_bytes, disk_bytes = disk_forecast(module, settings)
    disk_free = _free_disk(run) if process.rank == 0 else disk_bytes  # only the first process writes
    if disk_bytes > disk_free:
        every_fault.append(
            f"The checkpoints need up to {human_bytes(disk_bytes)}, but the disk of {settings.run} has "
            f"{human_bytes(disk_free)} free: free some space, or lower train.keep, train.average or train.snapshots."
        )
    if every_fault:
        # Ids outside the vocabulary would make the dry step fail, with a worse message.
        raise InputError.from_faults(every_fault, subject="the run")
    held = 0 if memory_before is None else max(0, memory_in_use(device_of(module)) - memory_before)
    memory_free = free_for_each(device_of(module), process.local_size) + held
    cost = measure_step_cost(trial, is_alone=process.size == 1, display=display)
    # Writing a checkpoint makes one copy of it.
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
        weights=_weights_by_dtype(module),
        gradient_bytes=_gradient_bytes(module),
        forecasts=_forecast_precisions(module),
        cost=saved,
        steps=steps,
        validations=validations,
        seconds=saved.step_seconds * steps + saved.validation_seconds * validations if steps is not None else None,
        limit=settings.seconds,
    )


def _gradient_bytes(module: nn.Module) -> int:
    """Return the size of the gradients of all trained weights, in bytes."""
    return sum(size_of(weight) for weight in module.parameters() if weight.requires_grad)


def _forecast_precisions(module: nn.Module) -> Sequence[MemoryForecast]:
    """Return the memory that the trained model needs in each precision; empty if it is small or has no spec."""
    if not isinstance(module, Transformer) or weight_bytes(module) < LARGE_MODEL:
        return ()
    return forecast_memory(module.spec, find_merged_dtypes(module.state_dict()), is_mapped=False)


def disk_forecast(module: nn.Module, settings: TrainSettings) -> tuple[int, int]:
    """Return the size of one checkpoint in bytes, and the maximum size of all files that a run keeps."""
    weights = weight_bytes(module)
    trained = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    checkpoint = weights * (1 + (settings.ema is not None)) + trained * OPTIMIZER_SLOTS
    # The last checkpoints, the best one, and the one that is written before an old one is deleted.
    checkpoints = checkpoint * (settings.keep + 2)
    averaging = weights * (settings.average + 1) if settings.average else 0
    return checkpoint, checkpoints + averaging + weights * num_snapshots(settings, module)


def _weights_by_dtype(module: nn.Module) -> dict[str, int]:
    """Return the bytes of the weights in this process by dtype; shared weights count once."""
    sizes: dict[str, int] = {}
    for weight in (*module.parameters(), *module.buffers()):
        dtype = str(weight.dtype).removeprefix("torch.")
        sizes[dtype] = sizes.get(dtype, 0) + size_of(weight)
    return sizes


def _free_disk(run: Path) -> int:
    folder = run / "checkpoints"
    status = [path.stat() for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    # By inode, because recent weights are hard links to those of the checkpoints.
    held = sum({entry.st_ino: entry.st_size for entry in status}.values())
    return shutil.disk_usage(run).free + held


LEAST_SIZES: Final = 4
"""Minimum number of batch sizes to measure if each size needs its own kernels."""
MOST_BATCHES: Final = 8
"""Maximum number of batches to measure: enough for an average."""
LEAST_PRODUCTS: Final = 2**30
"""Minimum number of products (weights * tokens) in a batch for which a CPU compares two precisions."""
TRIAL_PRODUCTS: Final = 2**34
"""Number of products (weights * tokens) to compare two precisions: they take about a second."""
MOST_TIMES: Final = 3
"""Maximum number of timings of one measurement; the fastest counts, since other load only slows it down."""
ONCE: Final = 1.0
"""A measurement that takes this time in seconds, or longer, is not repeated."""
MOST_STEPS: Final = 3
"""Number of steps whose time a pre-flight may take."""
MOST_SHARE: Final = 0.05
"""Share of the forecast run time that a pre-flight may take, if it is longer."""
REPEATED: Final = 0.5
"""Share of the time limit after which no measurement is repeated; the rest is for single measurements."""
WORTHWHILE: Final = 0.9
"""bf16 is chosen if its time is at most this share of the time of fp32."""


def measure_step_cost(
    trial: Trial[BatchT], *, seconds: float = 0.8, is_alone: bool = True, display: Display = SILENT
) -> StepCost:
    """Measure the cost of training with steps that have no effect on module, optimizer and random states.

    Args:
        trial: the training to measure.
        seconds: the time in seconds after which no further batch is measured.
        is_alone: True if one process trains alone; several processes measure everything once.
        display: the display that shows a line before each measurement.

    Raises:
        InputError: the largest batch does not fit into memory.
    """
    module, optimizer, work, settings = trial.module, trial.optimizer, trial.work, trial.settings
    assert not optimizer.state, "the measurement would clear the state of the optimizer: use a new optimizer"
    device, batches_state = device_of(module), work.batches.state()
    limit = TimeLimit(time.perf_counter(), max(seconds, ONCE), is_alone)
    dry = DryRun(module, work.loss, device, settings.precision, limit, display)
    with preserve_random_state(), preserve_threads(), deterministic_algorithms(), preserve_module(module):
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        if settings.compile:
            first = next(work.batches) if work.largest is None else work.largest
            dry.announce("the time of compiling and of a first pass")
            display.message(f"compiled    in {duration(dry.time_forward_backward(first))}")
        before = start_peak(device)
        passes, batch, peak = dry.measure_passes(trial, seconds=seconds)
        one_batch = sum(passes) / len(passes) + work.reading_seconds
        dry.announce(f"a validation of {batch.num_tokens:,} tokens")
        validation = (
            dry.time_fastest(partial(dry.time_forward, batch), seconds)
            * work.valid_share
            * work.batches.batches_per_epoch
        )
        if work.score_seconds is not None:
            dry.announce("the score of a validation")
            validation += dry.time_score(work.score_seconds)
        peak = max(peak, peak_memory(device))
        dry.announce("an update by the optimizer")
        update = dry.time_update_step(optimizer, clip=settings.clip, seconds=seconds)
        memory = max(peak + dry.state_bytes, peak_memory(device)) - before
        # Each trial of another setting would be compiled.
        slowdowns = [] if settings.compile else dry.find_slowdowns(batch, passes[-1])
    work.batches.load_state(batches_state)
    if settings.ema is not None:
        memory += sum(map(size_of, module.parameters()))
    return StepCost(one_batch * settings.accumulate + update, validation, memory, dry.state_bytes, slowdowns)


def faster_precision(
    module: nn.Module, work: Workload[BatchT], train: Train, display: Display = SILENT
) -> Literal["fp32", "bf16"]:
    """Return the precision of a run; on a CPU with bf16 products, "auto" is the faster precision in a trial.

    The trial computes rows of one batch forward and backward in each precision, without any effect.

    Args:
        module: the module to train.
        work: the workload of the run.
        train: the [train] table of the run.
        display: the display that shows a line before and after the trial.

    Raises:
        InputError: a batch does not fit into memory.
    """
    device, batches_state = device_of(module), work.batches.state()
    chosen = choose_precision(train.precision, device)
    if train.precision != "auto" or device.type != "cpu" or not has_fast_bf16(device):
        return chosen
    batch = next(work.batches)
    count = num_parameters(module)
    if batch.num_tokens * count >= LEAST_PRODUCTS:
        rows = take_some_rows(batch, TRIAL_PRODUCTS // count)
        display.message(f"measuring   {rows.num_tokens:,} tokens in fp32 and in bf16")
        with preserve_random_state(), preserve_threads(), deterministic_algorithms(), preserve_module(module):
            if train.threads is not None:
                torch.set_num_threads(train.threads)
            tries = {}
            for name in ("fp32", "bf16"):
                tree = training_tree(module, name, recomputes_layers=train.activation_checkpointing)
                tries[name] = DryRun(tree, work.loss, device, name, TimeLimit(time.perf_counter(), ONCE))
            spent = {
                name: dry.time_fastest(partial(dry.time_forward_backward, rows), 0.0, warms_up=True)
                for name, dry in tries.items()
            }
        return_memory(0, device, "bf16")  # the memory of the kernels of the other precision
        chosen = "bf16" if spent["bf16"] <= WORTHWHILE * spent["fp32"] else "fp32"
        ratio = spent["fp32"] / max(spent["bf16"], 1e-9)
        display.message(f"precision   {chosen}: bf16 has {ratio:.2g} times the speed of fp32")
    work.batches.load_state(batches_state)
    return chosen


def take_some_rows(batch: BatchT, most_tokens: int) -> BatchT:
    """Return the first rows of a batch that have about `most_tokens` tokens together, at least one row.

    Batches of other classes than `Batch` are returned whole.
    """
    if not isinstance(batch, Batch):
        return batch
    count = max(1, len(batch.ids) * most_tokens // max(1, batch.num_tokens))
    return cast(BatchT, batch.take_rows(slice(count)))


@dataclass
class TimeLimit:
    """The time limit of a pre-flight; after it, all optional measurements are left out.

    Attributes:
        began: the start of the pre-flight, in seconds of the performance counter.
        seconds: the limit in seconds. `fit_run` raises it for a run with long steps.
        is_alone: True if one process trains alone. Several processes cannot decide by their clocks, so they leave out
            all optional measurements.
    """

    began: float
    seconds: float
    is_alone: bool = True

    def fit_run(self, settings: TrainSettings, batch_seconds: float, batches_per_epoch: int) -> None:
        """Raise the limit to fit a run with batches of `batch_seconds` seconds each."""
        step, steps = batch_seconds * settings.accumulate, planned_steps(settings, batches_per_epoch)
        ends = [end for end in (settings.seconds, None if steps is None else step * steps) if end is not None]
        self.seconds = max(self.seconds, MOST_STEPS * step, MOST_SHARE * min(ends, default=0.0))

    def allows(self, seconds: float, share: float = 1.0) -> bool:
        """Return whether a measurement of `seconds` seconds ends within `share` (0 to 1) of the time limit."""
        return self.is_alone and time.perf_counter() - self.began + seconds <= share * self.seconds


@dataclass
class DryRun(Generic[BatchT]):
    """Measures the time and memory of passes, updates and scores, without changing the weights of the module.

    Attributes:
        limit: the time limit, which decides whether a measurement is repeated.
        display: the display that shows the current measurement.
        peak: the peak memory use during a pass, in bytes.
        state_bytes: the size of the optimizer's state in bytes, which later passes have in memory.
    """

    module: nn.Module
    loss: Callable[[nn.Module, BatchT], tuple[Tensor, int]]
    device: torch.device
    precision: str
    limit: TimeLimit
    display: Display = SILENT
    peak: int = 0
    state_bytes: int = 0

    def announce(self, measurement: str) -> None:
        """Show the name of the measurement that begins."""
        self.display.message(f"measuring   {measurement}")

    def time_fastest(self, measure: Callable[[], float], seconds: float, *, warms_up: bool = False) -> float:
        """Repeat a measurement, and return the shortest time in seconds.

        Args:
            measure: a function that measures once and returns the time in seconds.
            seconds: the total time of all repetitions in seconds; the measurement is made at least twice.
            warms_up: True if the first measurement does more work than later ones; it counts only if none follows.
        """
        times, repeats = [measure()], self.limit.is_alone
        if warms_up and not (repeats and times[0] >= ONCE):
            times = [measure()]
        while len(times) < MOST_TIMES and times[0] < ONCE and self.limit.allows(times[0], REPEATED):
            if len(times) >= 2 and sum(times) >= seconds:
                break
            times.append(measure())
        return min(times)

    def time_forward_backward(self, batch: BatchT) -> float:
        """Return the time of a forward and backward pass in seconds."""
        self.module.train()
        self.module.zero_grad(set_to_none=True)
        began = time.perf_counter()
        try:
            total, _ = self._loss(batch)
            # All activations are in memory now; read the use in case the system reports no peak.
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

    def measure_passes(self, trial: Trial[BatchT], *, seconds: float) -> tuple[list[float], BatchT, int]:
        """Measure the largest batch, and average batches while there is time.

        Returns:
            The time of each average batch in seconds, the last of these batches, and the forecast peak memory in bytes
            after batches of all sizes.
        """
        work, limit = trial.work, self.limit
        needs_all = needs_kernels(self.device, self.precision)
        batch = next(work.batches) if work.largest is None else work.largest
        self.announce(f"forward and backward passes, first of the largest batch ({batch.num_tokens:,} tokens)")
        spent = self.time_forward_backward(batch)
        self.peak, held = max(self.peak, peak_memory(self.device)), memory_in_use(self.device)
        limit.fit_run(trial.settings, spent, work.batches.batches_per_epoch)
        first, sizes, taken = len(_sizes(batch)), _sizes(batch), list[float]()
        least, most = min(LEAST_SIZES, work.num_sizes) if needs_all else 1, MOST_BATCHES if limit.is_alone else 1

        def needs_another() -> bool:
            is_early = time.perf_counter() < limit.began + seconds
            return limit.allows(spent, REPEATED) and (len(sizes) < least or is_early)

        while len(taken) < most and (not taken or needs_another()):
            fetched = time.perf_counter()
            batch = next(work.batches)
            fetching = time.perf_counter() - fetched
            if limit.is_alone and spent >= ONCE and _sizes(batch) == sizes and not taken:
                return [fetching + spent], batch, self.peak
            sizes |= _sizes(batch)
            if spent >= ONCE:
                self.announce(f"forward and backward passes of {batch.num_tokens:,} tokens")
            # The first pass of a size also compiles kernels.
            taken.append(fetching + self.time_fastest(partial(self.time_forward_backward, batch), 0.0))
        peak = max(self.peak, peak_memory(self.device))
        if needs_all and len(sizes) > first:
            grown = max(0, memory_in_use(self.device) - held)  # the same growth for each other size
            peak = max(peak, self.peak + grown * max(1, work.num_sizes - first) // (len(sizes) - first))
        return taken, batch, peak

    def find_slowdowns(self, batch: BatchT, seconds: float) -> list[Slowdown]:
        """Return the settings that slow down steps, measured with passes of some rows with and without each setting.

        Args:
            batch: the batch that has the rows.
            seconds: the time of a forward and backward pass of the whole batch in seconds.
        """
        self.module.train()
        suspects = find_suspects(self) if self.limit.is_alone else []
        if not suspects:
            return []
        rows = take_some_rows(batch, TRIAL_PRODUCTS // num_parameters(self.module))
        needed, measure = seconds * rows.num_tokens / batch.num_tokens, partial(self.time_forward_backward, rows)
        usual: float | None = seconds if rows.num_tokens == batch.num_tokens else None
        slowdowns = []
        for suspect in suspects:
            if not self.limit.allows(needed * (1 + (usual is None))):
                slowdowns.append(Slowdown(suspect.setting, suspect.reason))
                continue
            self.announce(f"{rows.num_tokens:,} tokens with and without {suspect.setting}")
            usual = self.time_fastest(measure, 0.0, warms_up=True) if usual is None else usual
            with suspect.turn_off():
                factor = usual / max(self.time_fastest(measure, 0.0, warms_up=True), 1e-9)
            if factor >= NOTABLE:
                slowdowns.append(Slowdown(suspect.setting, suspect.reason, factor))
        return slowdowns

    def time_forward(self, batch: BatchT) -> float:
        """Return the time of a forward pass of a validation in seconds."""
        self.module.eval()
        with torch.no_grad():
            began = time.perf_counter()
            self._loss(batch)
            return self._since(began)

    def time_score(self, seconds: Callable[[nn.Module], float]) -> float:
        """Return the time of the score of a validation in seconds."""
        self.module.eval()
        with torch.no_grad(), self._autocast():
            return seconds(self.module)

    def time_update_step(self, optimizer: torch.optim.Optimizer, *, clip: float | None, seconds: float) -> float:
        """Return the time of an optimizer update in seconds; the optimizer's state is cleared afterwards.

        With a learning rate of 0 and gradients of 0, no bit of the weights changes.
        """
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        torch._foreach_zero_(gradients)

        def time_update() -> float:
            began = time.perf_counter()
            scale_gradients(self.module.parameters(), 1.0, max_norm=clip)
            optimizer.step()
            return self._since(began)

        spent = self.time_fastest(time_update, seconds, warms_up=True)  # the first update also allocates the state
        values = [value for state in optimizer.state.values() for value in state.values()]
        self.state_bytes = sum(size_of(value) for value in values if isinstance(value, Tensor))
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
    """Return the batch size of each stack, in padded tokens."""
    return {value.numel() for value in vars(batch).values() if isinstance(value, Tensor) and value.dim() == 2}


@contextlib.contextmanager
def preserve_module(module: nn.Module) -> Iterator[None]:
    """Return a context manager that restores the gradients, buffers and modes of a module."""
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
