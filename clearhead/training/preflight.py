"""Checks before the first step: report now what would fail later, and forecast what the run costs."""

from __future__ import annotations

import contextlib
import gc
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Generic

import psutil
import torch
from torch import Tensor, nn

from clearhead.core import build
from clearhead.errors import InputError
from clearhead.machine import free_memory, refuse_memory, size
from clearhead.spec import Model
from clearhead.training.kernel_cache import needs_kernels
from clearhead.training.optim.gradients import scale_gradients
from clearhead.training.progress.reports import duration
from clearhead.training.protocols import Batches, BatchT
from clearhead.training.random_state import deterministic_algorithms, preserved_random_state, restored_threads
from clearhead.training.settings import TrainSettings, planned_steps

OPTIMIZER_SLOTS: Final = 2
"""Values that an optimizer of the Adam family keeps for each parameter: two moments of the gradient."""
LEAST_SIZES: Final = 4
"""So many sizes of batches are tried at least where each needs kernels of its own."""
MOST_BATCHES: Final = 8
"""So many batches are tried at most: enough for an average."""
CHECKPOINT_SPEED: Final = 2e8
"""Bytes of a checkpoint that are written, synced and hashed in a second, roughly."""
PLOT_BYTES: Final = 60_000_000
"""What the plots take: matplotlib is imported for the first of them."""


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
    """What a run computes.

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
class Preflight:
    """A forecast of the cost of a run.

    Attributes:
        parameters: number of trained parameters.
        checkpoint_bytes: size of one checkpoint.
        disk_bytes: size of everything that is kept at one time.
        disk_free: free space on the disk of the run directory, and the space that the run already uses.
        memory_bytes: the peak of memory, with what the data of the run holds now.
        memory_free: memory that is free, with what the data of the run holds now.
        cost: of one step and one validation.
        steps: the last step; None if it is not known.
        validations: how many there are in these steps.
        seconds: the time of the run, with validations and checkpoints; None if the number of steps is not known.
    """

    parameters: int
    checkpoint_bytes: int
    disk_bytes: int
    disk_free: int
    memory_bytes: int
    memory_free: int
    cost: StepCost
    steps: int | None
    validations: int
    seconds: float | None

    def lines(self) -> list[str]:
        """Return the forecast as lines of text."""
        total = ""
        if self.seconds is not None:
            many = "" if self.validations == 1 else "s"
            total = f"; {duration(self.seconds)} for {self.steps:,} steps with {self.validations} validation{many}"
        return [
            f"parameters  {self.parameters:,}",
            f"memory      about {size(self.memory_bytes)} of {size(self.memory_free)} free",
            f"disk        {size(self.checkpoint_bytes)} a checkpoint, up to {size(self.disk_bytes)} in all, "
            f"of {size(self.disk_free)} free",
            f"time        about {duration(self.cost.step_seconds)} a step, "
            f"{duration(self.cost.validation_seconds)} a validation{total}",
        ]


def refuse_large(model: Model, device: torch.device, *, is_trained_whole: bool) -> None:
    """Refuse a model that does not fit into memory with what its training needs at least, before it is built.

    Args:
        model: its spec.
        device: on which it will be trained.
        is_trained_whole: each weight has a gradient and the two moments of an optimizer.

    Raises:
        InputError: it does not fit.
    """
    count = sum(parameter.numel() for parameter in build(model, device="meta").parameters())
    needed = 4 * count * (2 + OPTIMIZER_SLOTS if is_trained_whole else 1)
    refuse_memory(
        needed, f"Training {count:,} parameters", free=free_memory(device), advice="lower model.layers or model.width"
    )


def preflight(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    work: Workload[BatchT],
    settings: TrainSettings,
    *,
    sides: Sequence[TokenSide],
    memory_before: int | None = None,
) -> Preflight:
    """Check a run before its first step and forecast its cost, without changing anything.

    Args:
        module: what will be trained.
        optimizer: over its parameters, without a state yet.
        work: what the run computes.
        settings: of the run.
        sides: the sides of the data.
        memory_before: what the process held before it read the data, by `memory_in_use`; None: what it holds now.

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
    held = 0 if memory_before is None else max(0, memory_in_use(device_of(module)) - memory_before)
    memory_free = free_memory(device_of(module)) + held
    cost = step_cost(module, optimizer, work, settings)
    # A checkpoint is copied once while it is written.
    memory = held + cost.memory_bytes + checkpoint_bytes + (PLOT_BYTES if settings.plots else 0)
    refuse_memory(
        memory, "Training", free=memory_free, advice="lower train.batch_tokens and raise train.accumulate instead"
    )
    steps = planned_steps(settings, work.batches.batches_per_epoch)
    validations = -(-steps // settings.validate_every) if steps is not None else 0
    saved = replace(cost, validation_seconds=cost.validation_seconds + checkpoint_bytes / CHECKPOINT_SPEED)
    return Preflight(
        parameters=sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad),
        checkpoint_bytes=checkpoint_bytes,
        disk_bytes=disk_bytes,
        disk_free=disk_free,
        memory_bytes=memory,
        memory_free=memory_free,
        cost=saved,
        steps=steps,
        validations=validations,
        seconds=saved.step_seconds * steps + saved.validation_seconds * validations if steps is not None else None,
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
        f"give {init} more of them with: python -c {shlex.quote(code)} - and then train with "
        f"{shlex.quote(f'task.init={saved}')}"
    )


def disk_forecast(module: nn.Module, settings: TrainSettings) -> tuple[int, int]:
    """Return the bytes of one checkpoint, and of everything that a run keeps at one time."""
    weights = sum({(one.data_ptr(), one.shape): _bytes(one) for one in module.state_dict().values()}.values())
    trained = sum(_bytes(parameter) for parameter in module.parameters() if parameter.requires_grad)
    checkpoint = weights * (1 + (settings.ema is not None)) + trained * OPTIMIZER_SLOTS
    # The last checkpoints, the best one, and the one being written before an old one is deleted.
    kept = checkpoint * (settings.keep + 2)
    averaging = weights * (settings.average + 1) if settings.average else 0
    return checkpoint, kept + averaging


def step_cost(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    work: Workload[BatchT],
    settings: TrainSettings,
    *,
    seconds: float = 1.0,
) -> StepCost:
    """Measure what training costs by steps without effect: afterwards module, optimizer and random states are the same.

    Args:
        module: what will be trained.
        optimizer: over its parameters, without a state yet.
        work: what the run computes.
        settings: of the run.
        seconds: once so much time is spent, no further batch is tried; each thing is tried once at least.

    Raises:
        InputError: the largest batch does not fit into memory.
    """
    assert not optimizer.state, "an optimizer with a state would lose it"
    device, place, began = device_of(module), work.batches.state(), time.perf_counter()
    dry = _DryRun(module, work.loss, device, settings.precision)
    with preserved_random_state(), restored_threads(), deterministic_algorithms(), _restored_module(module):
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        before = _start_peak(device)
        passes, batch, peak = dry.passes(work, seconds=seconds - (time.perf_counter() - began))
        one_batch = sum(passes) / len(passes) + work.reading_seconds
        validation = dry.forward(batch) * work.valid_share * work.batches.batches_per_epoch
        if work.score_seconds is not None:
            validation += dry.score(work.score_seconds)
        peak = max(peak, _peak(device))
        update = dry.update(optimizer, clip=settings.clip)
        memory = max(peak + dry.state_bytes, _peak(device)) - before
    work.batches.load_state(place)
    if settings.ema is not None:
        memory += sum(map(_bytes, module.parameters()))
    return StepCost(one_batch * settings.accumulate + update, validation, memory)


class _DryRun(Generic[BatchT]):
    """Parts of a step, timed; the module's weights stay as they are.

    Attributes:
        peak: of memory, seen within a pass.
        state_bytes: size of the optimizer's state, which a real pass finds in memory.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[nn.Module, BatchT], tuple[Tensor, int]],
        device: torch.device,
        precision: str,
    ) -> None:
        self.module, self.loss, self.device, self.precision = module, loss, device, precision
        self.peak = self.state_bytes = 0

    def forward_backward(self, batch: BatchT) -> float:
        """Return the seconds of a forward and backward pass."""
        self.module.train()
        self.module.zero_grad(set_to_none=True)
        began = time.perf_counter()
        try:
            total, _ = self._loss(batch)
            # Here all activations are in memory, which matters where the system reports no peak.
            self.peak = max(self.peak, _peak(self.device))
            total.backward()
            return self._since(began)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise InputError(
                f"The largest batch ({batch.num_tokens} tokens) does not fit into memory: lower train.batch_tokens "
                "and raise train.accumulate instead."
            ) from error

    def passes(self, work: Workload[BatchT], *, seconds: float) -> tuple[list[float], BatchT, int]:
        """Try the largest batch, and others while there is time.

        Returns:
            the seconds of each of the others, the last of them, and the peak of memory once all sizes were read.
        """
        began, needs_all = time.perf_counter(), needs_kernels(self.device, self.precision)
        batch = next(work.batches) if work.largest is None else work.largest
        self.forward_backward(batch)
        self.peak, held = max(self.peak, _peak(self.device)), memory_in_use(self.device)
        first, sizes, taken = len(_sizes(batch)), _sizes(batch), list[float]()
        least = min(LEAST_SIZES, work.num_sizes) if needs_all else 1
        while len(taken) < MOST_BATCHES and (not taken or len(sizes) < least or time.perf_counter() - began < seconds):
            fetched = time.perf_counter()
            batch = next(work.batches)
            fetching = time.perf_counter() - fetched
            sizes |= _sizes(batch)
            spent = self.forward_backward(batch)
            if time.perf_counter() - began < seconds:
                spent = self.forward_backward(batch)  # the first one of a size chose kernels as well
            taken.append(fetching + spent)
        peak = max(self.peak, _peak(self.device))
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

    def update(self, optimizer: torch.optim.Optimizer, *, clip: float | None) -> float:
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
        self.state_bytes = sum(_bytes(value) for value in values if isinstance(value, Tensor))
        began = time.perf_counter()
        scale_gradients(self.module.parameters(), 1.0, max_norm=clip)
        optimizer.step()
        spent = self._since(began)
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


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters."""
    return next(module.parameters()).device


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch ran out of memory, on an accelerator or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


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


def memory_in_use(device: torch.device) -> int:
    """Return the bytes that this process holds: of the accelerator where there is one, else of main memory."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


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
