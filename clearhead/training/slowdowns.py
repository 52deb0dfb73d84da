"""Settings that slow down the steps of a run, and how to measure steps without them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from torch import nn

from clearhead.core.attention import Attention
from clearhead.fast.probe import has_fast_bf16
from clearhead.fast.training.attention import needs_weights
from clearhead.fast.training.tree import FusedAttention, RecomputedLayer
from clearhead.generate.batching import device_of

NOTABLE: Final = 1.1
"""Minimum ratio of the time of steps with a setting to that without it for which the setting is reported."""


@dataclass(frozen=True)
class Slowdown:
    """A setting that makes steps slower.

    Attributes:
        setting: the key of the run file and its value, such as "model.attention_dropout = 0.1".
        reason: the reason for the extra time.
        factor: the time of a step with the setting, divided by the time without it. None means not measured.
    """

    setting: str
    reason: str
    factor: float | None = None

    def line(self) -> str:
        """Return the slowdown as a line of text."""
        times = "not measured" if self.factor is None else f"{self.factor:.2g} times"
        return f"slower      {times}, by {self.setting}: {self.reason}"


@runtime_checkable
class Passes(Protocol):
    """An object that times forward and backward passes of a module in a precision, "fp32" or "bf16"."""

    module: nn.Module
    precision: str


@dataclass(frozen=True)
class Suspect:
    """A setting that may make steps slower.

    Attributes:
        setting, reason: the key with its value, and the reason, as in `Slowdown`.
        owners: the objects that have the setting as an attribute.
        attribute: the name of this attribute.
        off: the value of the attribute without the setting.
    """

    setting: str
    reason: str
    owners: Sequence[object]
    attribute: str
    off: float | bool | str

    @contextlib.contextmanager
    def turn_off(self) -> Iterator[None]:
        """Return a context manager in which the setting is off."""
        before = [getattr(owner, self.attribute) for owner in self.owners]
        for owner in self.owners:
            setattr(owner, self.attribute, self.off)
        try:
            yield
        finally:
            for owner, value in zip(self.owners, before, strict=True):
                setattr(owner, self.attribute, value)


def find_suspects(passes: Passes) -> list[Suspect]:
    """Return the settings of a module that may slow down a step; the caller measures whether they do."""
    suspects = _attention_dropout(passes), _recomputation(passes), _slow_precision(passes)
    return [suspect for suspect in suspects if suspect is not None]


def _attention_dropout(passes: Passes) -> Suspect | None:
    attentions = [module for module in passes.module.modules() if isinstance(module, Attention)]
    dropped = [attention for attention in attentions if attention.dropout.p > 0.0]
    if not dropped:
        return None
    rates = sorted({attention.dropout.p for attention in dropped})
    setting = f"model.attention_dropout = {' and '.join(map('{:g}'.format, rates))}"
    reason = "each attention weight needs a random number"
    if not all(_drops_in_kernel(attention) for attention in dropped):
        reason = "it needs the eager attention kernel, which builds all attention weights"
    return Suspect(setting, f"{reason}; 0 avoids it", [attention.dropout for attention in dropped], "p", 0.0)


def _drops_in_kernel(attention: Attention) -> bool:
    """Return whether an attention in training mode drops weights inside a fused kernel of the CPU or the GPU."""
    is_on_cpu = isinstance(attention, FusedAttention) and not needs_weights(attention)
    return is_on_cpu or attention.kernel()[0] == "fused"


def _recomputation(passes: Passes) -> Suspect | None:
    layers = [module for module in passes.module.modules() if isinstance(module, RecomputedLayer)]
    reason = "each layer is computed twice, to save memory"
    return Suspect("train.activation_checkpointing = true", reason, layers, "recomputes", False) if layers else None


def _slow_precision(passes: Passes) -> Suspect | None:
    device = device_of(passes.module)
    if passes.precision != "bf16" or device.type != "cpu" or has_fast_bf16(device):
        return None
    reason = 'this processor multiplies fp32 faster; "auto" or "fp32" avoids it'
    return Suspect('train.precision = "bf16"', reason, [passes], "precision", "fp32")
