"""What training costs on this machine, measured by a few steps without effect."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Generic, Literal

import psutil
import torch
from torch import Tensor, nn

from clearhead.base.errors import InputError
from clearhead.base.machine import choose_precision
from clearhead.base.printing import num_parameters
from clearhead.fast.probe import has_fast_bf16
from clearhead.fast.training.parts import training_tree
from clearhead.generate.batching import device_of
from clearhead.training.kernel_cache import needs_kernels, return_memory
from clearhead.training.optim.gradients import scale_gradients
from clearhead.training.protocols import Batches, BatchT
from clearhead.training.random_state import deterministic_algorithms, preserved_random_state, restored_threads
from clearhead.training.runfile.sections import Train
from clearhead.training.settings import TrainSettings

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


def step_cost(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    work: Workload[BatchT],
    settings: TrainSettings,
    *,
    seconds: float = 0.8,
    is_alone: bool = True,
) -> StepCost:
    """Measure what training costs by steps without effect: afterwards module, optimizer and random states are the same.

    Args:
        module: what will be trained.
        optimizer: over its parameters, without a state yet.
        work: what the run computes.
        settings: of the run.
        seconds: once so much time is spent, no further batch is tried; each thing is timed twice at least.
        is_alone: whether no other process takes part in each step; several time each thing once.

    Raises:
        InputError: the largest batch does not fit into memory.
    """
    assert not optimizer.state, "an optimizer with a state would lose it"
    device, batches_state, began = device_of(module), work.batches.state(), time.perf_counter()
    dry = _DryRun(module, work.loss, device, settings.precision, is_alone=is_alone)
    with preserved_random_state(), restored_threads(), deterministic_algorithms(), _restored_module(module):
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        before = _start_peak(device)
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


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch ran out of memory, on an accelerator or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


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
    return peak_memory(device)


def peak_memory(device: torch.device) -> int:
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


def size_of(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes on this process: those of its own shard, where it is sharded."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.nbytes
