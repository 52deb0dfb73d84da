"""Decision of a run to compile its training: by the run file, or by a forecast and a trial."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from clearhead.base.errors import InputError
from clearhead.base.progress import Display
from clearhead.core import Transformer
from clearhead.data.batches.base import Batch, Batches
from clearhead.fast.device_check import device_name
from clearhead.fast.native.build import recall_verdict
from clearhead.fast.training.compiled import FullBatch, NotCompiled, end_warm_up, is_ready
from clearhead.fast.training.compiler import find_obstacle
from clearhead.fast.training.tree import training_tree
from clearhead.training.parallel.engines import TrainingEngine
from clearhead.training.parallel.world import Process
from clearhead.training.preflight import ONCE, DryRun, TimeLimit, preserve_module
from clearhead.training.progress.reports import duration
from clearhead.training.random_state import deterministic_algorithms, preserve_random_state, preserve_threads
from clearhead.training.record import planned_steps
from clearhead.training.runfile.sections import Train
from clearhead.training.task_setup import PreparedTask

EXPECTED_GAIN: Final = 0.3
"""Share of the time of a step that compiling is expected to save."""
WORTHWHILE: Final = 2.0
"""A run compiles if the expected gain is this many times the forecast of compiling."""
BASE_SECONDS: Final = 5.0
LAYER_SECONDS: Final = 2.0
"""Forecast of compiling, in seconds: a base, and a time for each layer."""
MOST_PASSES: Final = 4
"""Maximum number of batches to compile with: at most one of an epoch has another length than the graph."""
CACHED_SHARE: Final = 1 / 3
"""Share of the forecast if the same model has been compiled on this machine before."""


def full_batch(parts: PreparedTask[Any], process: Process) -> FullBatch | None:
    """Return the shape of a full batch of one process; None if the batches of a run have several lengths."""
    spec, batch = parts.spec, parts.largest
    is_single = spec.encoder is None or spec.decoder is None
    if not (is_single and isinstance(batch, Batch) and parts.batches.plan.has_one_length()):
        return None
    rows, tokens = batch.ids.shape
    return FullBatch(-(-rows // process.size), tokens, batch.mask is not None)


@dataclass(frozen=True)
class CompileChoice:
    """The choice whether a run is compiled.

    Attributes:
        module: the plain module with its first weights.
        parts: the prepared task.
        train: the [train] table of the run.
        precision: the precision of the computation.
        device: the device of the training; a module that is sharded later may be on another device.
        display: the display that shows the choice and its reason.
        process: this process among all that train together.
    """

    module: Transformer
    parts: PreparedTask[Any]
    train: Train
    precision: str
    device: torch.device
    display: Display
    process: Process

    def check(self, *, is_resumed: bool) -> None:
        """Refuse to compile where it is impossible.

        Args:
            is_resumed: True if the run began compiled, so that it must continue compiled.

        Raises:
            InputError: the machine or the model cannot compile; the reason and the fix are named.
        """
        reason = find_obstacle(self.module, self.device)
        if reason:
            other = "resume the run where it began, or begin a new one" if is_resumed else "set compile = false"
            raise InputError(f"[train] compile = true is impossible here: {reason}, or {other}")

    def decide(self, *, is_sharded: bool) -> bool:
        """Return whether compiling pays, and show the reason.

        Args:
            is_sharded: True if the weights are sharded over the processes, so that nothing can be tried.
        """
        reason = find_obstacle(self.module, self.device)
        if is_sharded:
            reason = "a sharded model cannot be tried before the run; compile = true compiles it"
        pays, line = (False, reason) if reason else self._try()
        self.display.message(f"compile     {'on' if pays else 'off'}: {line}")
        return pays

    def _try(self) -> tuple[bool, str]:
        """Time eager steps and, if the run is long enough, compiled ones; return the choice and the reason."""
        batches = self.parts.batches
        state = batches.state()
        try:
            batch = next(batches) if self.parts.largest is None else self.parts.largest
            if isinstance(batch, Batch):
                batch = batch.take_rows(slice(self.process.rank, None, self.process.size))
            with preserve_random_state(), preserve_threads(), deterministic_algorithms(), preserve_module(self.module):
                if self.train.threads is not None:
                    torch.set_num_threads(self.train.threads)
                return self._compare(batch)
        finally:
            batches.load_state(state)

    def _compare(self, batch: Any) -> tuple[bool, str]:
        eager_dry = self._dry_run(compiles=False)
        eager = eager_dry.time_fastest(partial(eager_dry.time_forward_backward, batch), 0.0, warms_up=True)
        step = eager * self.train.accumulate
        steps = planned_steps(self.train, self.parts.batches.batches_per_epoch)
        ends = [self.train.seconds, None if steps is None else steps * step]
        gain = EXPECTED_GAIN * min(end for end in ends if end is not None)
        forecast = self.forecast_seconds()
        if gain <= WORTHWHILE * forecast:
            return False, f"it would save about {duration(gain)} and take about {duration(forecast)}"
        self.display.message(f"measuring   compiled steps; compiling takes about {duration(forecast)}")
        dry = self._dry_run(compiles=True)
        try:
            first = dry.time_forward_backward(batch)
            compiled = dry.time_fastest(partial(dry.time_forward_backward, batch), 0.0)
        except NotCompiled as error:
            torch.compiler.reset()
            return False, error.reason
        self._remember(first)
        ratio = f"{eager / max(compiled, 1e-9):.2g} times the speed of eager steps, compiled in {duration(first)}"
        if compiled >= eager:
            torch.compiler.reset()
        return compiled < eager, ratio

    def _dry_run(self, *, compiles: bool) -> DryRun[Any]:
        tree = training_tree(
            self.module,
            self.precision,
            recomputes_layers=self.train.activation_checkpointing,
            compiles=compiles,
            full=full_batch(self.parts, self.process) if compiles else None,
            by_layer=self.process.size > 1,
        )
        limit = TimeLimit(time.perf_counter(), ONCE)
        return DryRun(tree, self.parts.loss, self.device, self.precision, limit, self.display)

    # What was compiled before

    def forecast_seconds(self) -> float:
        """Return the expected time to compile the model, in seconds."""
        stacks = [stack for stack in (self.module.encoder, self.module.decoder) if stack is not None]
        seconds = BASE_SECONDS + LAYER_SECONDS * sum(len(stack.order) for stack in stacks)
        return seconds * (CACHED_SHARE if self._was_compiled() else 1.0)

    def _was_compiled(self) -> bool:
        def fail() -> str:
            raise FileNotFoundError

        try:
            return bool(recall_verdict(self._facts(), fail))
        except OSError:
            return False

    def _remember(self, seconds: float) -> None:
        """Note in the cache folder that PyTorch's cache has the graphs of this model; without a folder, do nothing."""
        with contextlib.suppress(OSError):
            recall_verdict(self._facts(), lambda: f"{seconds:.1f}")

    def _facts(self) -> list[bytes]:
        """Return all facts that the graphs depend on."""
        facts = (
            "compiled",
            self.module.spec.to_json(),
            self.precision,
            full_batch(self.parts, self.process),
            self.train.activation_checkpointing,
            device_name(self.device),
            torch.__version__,
        )
        return [repr(facts).encode()]


def compile_graphs(tree: nn.Module, engine: TrainingEngine[Any], batches: Batches[Any]) -> None:
    """Compile a training tree with passes that change nothing, and report every later compilation.

    Args:
        tree: the compiled training tree.
        engine: the engine of this process.
        batches: the batches; the caller restores their position.
    """
    with preserve_module(tree):
        for _ in range(MOST_PASSES):
            if is_ready(tree):
                break
            engine.warm_up(next(batches))
    end_warm_up(tree)
