"""The memory and the communication of a training on several GPUs, from the spec alone.

For N GPUs, P parameters in fp32 of which L are in the layers, l in the largest of them and R = P - L outside, and e
bytes of a number in the products (2 in bf16, else 4), a GPU holds

                     ddp              fsdp
    parameters       4 P              4 P / N
    gradients        4 P              4 P / N + e (l + R)       those of a layer are whole until they are added up,
                                      or + 4 P                  with accumulation all of them until the last batch
    optimizer        its state S      S / N
    weights at work  casts to bf16    e (2 l + R)               the gathered layer, the next one and what is outside

and what autograd keeps of its rows. In an update of A batches it sends and receives, each way,

    ddp     2 (N - 1) / N * 4 P                          gradients added up over all GPUs
    fsdp    (N - 1) / N * (A e (2 L + R) + 4 P)          weights gathered for forward and backward, gradients scattered

Layers that run at several depths count as outside, because they are not gathered one by one.

Source: arXiv 2006.15704 (DDP); arXiv 2304.11277 (FSDP); arXiv 1910.02054, section 5 (what is divided).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch

from clearhead.core import Transformer, build
from clearhead.core.stack import Stack
from clearhead.errors import InputError
from clearhead.machine import size
from clearhead.printing import num_parameters
from clearhead.spec import Model
from clearhead.spec.cost import FORWARD_AND_BACKWARD, FP32_BYTES, cost_per_token
from clearhead.training.activations import measure_activations
from clearhead.training.optim.optimizers import build_optimizer

Optimizer = Literal["adam", "adamw", "muon"]
Precision = Literal["fp32", "bf16"]

FULL: Final = 0.9
"""The share of a GPU's memory that a plan may fill; the rest is for temporary tensors and gaps."""


@dataclass(frozen=True)
class TrainingSetting:
    """What a plan is for.

    Args:
        gpus: how many there are, at least 1.
        memory: bytes of each.
        batch_tokens: tokens of a batch on all GPUs together, on the longer side.
        context: tokens of a row, on each side.
        optimizer: kind.
        precision: of the products.
        accumulate: batches of an update.
    """

    gpus: int
    memory: int
    batch_tokens: int
    context: int
    optimizer: Optimizer
    precision: Precision
    accumulate: int = 1

    @property
    def rows(self) -> int:
        """Rows of a batch on the GPU that has most.

        Raises:
            InputError: a GPU would have none.
        """
        rows = self.batch_tokens // self.context
        if rows < self.gpus:
            raise InputError(
                f"batch_tokens={self.batch_tokens} is {rows} row{'s' * (rows != 1)} of context={self.context}, fewer "
                f"than the {self.gpus} GPUs: raise it to at least {self.gpus * self.context}, or lower the context"
            )
        return -(-rows // self.gpus)


@dataclass(frozen=True)
class Share:
    """What one GPU holds and exchanges, in bytes.

    Attributes:
        parallel: how the work is divided.
        parameters, gradients, optimizer: held all the time.
        weights: at work: gathered from all GPUs, or cast to bf16.
        activations: kept for the backward pass.
        checkpointed: the same with activation checkpointing.
        gathered, scattered, reduced: tensors that all GPUs gather, add up and scatter, or add up, in a step.
        sent: by each GPU in a step, and as much received.
    """

    parallel: Literal["ddp", "fsdp"]
    parameters: int
    gradients: int
    optimizer: int
    weights: int
    activations: int
    checkpointed: int
    gathered: int
    scattered: int
    reduced: int
    sent: int

    def total(self, *, checkpointing: bool) -> int:
        """Return the bytes of memory, with activation checkpointing or without."""
        kept = self.checkpointed if checkpointing else self.activations
        return self.parameters + self.gradients + self.optimizer + self.weights + kept


@dataclass(frozen=True)
class TrainingPlan:
    """The memory and the communication of a training.

    Attributes:
        setting: what it is for.
        parameters: how many there are, shared ones counted once.
        largest_layer: parameters of the largest layer, which FSDP gathers at once.
        flops: of one step on one GPU, without what checkpointing computes again.
        shares: of ddp and of fsdp.
    """

    setting: TrainingSetting
    parameters: int
    largest_layer: int
    flops: int | float
    shares: tuple[Share, Share]

    @property
    def best(self) -> tuple[Share, bool] | None:
        """The first that fits, ddp before fsdp, and whether with activation checkpointing; None: nothing fits."""
        limit = FULL * self.setting.memory
        ways = [(share, checkpointing) for share in self.shares for checkpointing in (False, True)]
        return next((way for way in ways if way[0].total(checkpointing=way[1]) <= limit), None)

    def verdict(self) -> str:
        """Say in one sentence what fits."""
        room = f"{self.setting.gpus} GPU{'s' * (self.setting.gpus > 1)} of {size(self.setting.memory)}"
        best, (ddp, fsdp) = self.best, self.shares
        if best is None:
            return (
                f"nothing fits on {room}: fsdp with activation checkpointing takes "
                f"{size(fsdp.total(checkpointing=True))} of each, so take more GPUs or fewer batch_tokens"
            )
        share, checkpointing = best
        way = f"{share.parallel}{' with activation checkpointing' if checkpointing else ''}"
        other = ddp.total(checkpointing=checkpointing)
        beside = f"; ddp would take {size(other)}" if share is fsdp else ""
        return f"{way} fits on {room}: {size(share.total(checkpointing=checkpointing))} of each{beside}"


def plan_training(model: Model, setting: TrainingSetting) -> TrainingPlan:
    """Return the plan of a training.

    Args:
        model: its spec; nothing of it is allocated.
        setting: GPUs, batch, optimizer and precision.

    Raises:
        InputError: the batch has fewer rows than there are GPUs.
    """
    rows = setting.rows
    module = build(model, device="meta")
    counts = _Counts.of(module)
    state = optimizer_bytes(module, setting.optimizer)
    activations = measure_activations(model, setting.context, setting.precision)
    kept = {
        "activations": activations.kept(rows, checkpointing=False),
        "checkpointed": activations.kept(rows, checkpointing=True),
    }
    shares = _ddp(counts, setting, state, activations.fixed, kept), _fsdp(counts, setting, state, kept)
    cost = cost_per_token(model, setting.context, setting.context)
    flops = FORWARD_AND_BACKWARD * setting.accumulate * rows * setting.context * (cost.source_flops + cost.target_flops)
    return TrainingPlan(setting, counts.total, counts.largest, flops, shares)


@dataclass(frozen=True)
class _Counts:
    """Parameters: all, those in layers that are gathered one by one, those of the largest, and those outside."""

    total: int
    inside: int
    largest: int

    @property
    def outside(self) -> int:
        return self.total - self.inside

    @classmethod
    def of(cls, module: Transformer) -> _Counts:
        stacks = [submodule for submodule in module.modules() if isinstance(submodule, Stack)]
        apart = [layer for stack in stacks if len(set(stack.order)) == len(stack.order) for layer in stack.layers]
        layers = [num_parameters(layer) for layer in apart]
        return cls(num_parameters(module), sum(layers), max(layers, default=0))


def _ddp(counts: _Counts, setting: TrainingSetting, state: int, casts: int, kept: Mapping[str, int]) -> Share:
    weights = FP32_BYTES * counts.total
    return Share(
        "ddp",
        parameters=weights,
        gradients=weights,
        optimizer=state,
        weights=casts,
        activations=kept["activations"],
        checkpointed=kept["checkpointed"],
        gathered=0,
        scattered=0,
        reduced=weights if setting.gpus > 1 else 0,
        sent=2 * weights * (setting.gpus - 1) // setting.gpus,
    )


def _fsdp(counts: _Counts, setting: TrainingSetting, state: int, kept: Mapping[str, int]) -> Share:
    gpus, weights = setting.gpus, FP32_BYTES * counts.total
    number = 2 if setting.precision == "bf16" else FP32_BYTES
    gathered = setting.accumulate * number * (2 * counts.inside + counts.outside)
    whole = number * (counts.largest + counts.outside) if setting.accumulate == 1 else weights
    return Share(
        "fsdp",
        parameters=-(-weights // gpus),
        gradients=-(-weights // gpus) + (whole if gpus > 1 else 0),
        optimizer=-(-state // gpus),
        weights=number * (2 * counts.largest + counts.outside),
        activations=kept["activations"],
        checkpointed=kept["checkpointed"],
        gathered=gathered if gpus > 1 else 0,
        scattered=weights if gpus > 1 else 0,
        reduced=0,
        sent=(gathered + weights) * (gpus - 1) // gpus,
    )


def optimizer_bytes(module: Transformer, kind: Optimizer) -> int:
    """Return the bytes of an optimizer's state after its first update.

    Args:
        module: whose parameters it has; on "meta" nothing is allocated.
        kind: of the optimizer.
    """
    optimizer = build_optimizer(module, kind=kind, learning_rate=1.0)
    for parameter in module.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    state = [value for kept in optimizer.state.values() for value in kept.values()]
    return sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
