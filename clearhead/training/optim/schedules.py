"""Learning-rate schedules: functions of the step, and one that depends on the validation loss. The first step is 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from clearhead.base.errors import InputError

SCHEDULES_WITH_AN_END = ("cosine", "linear", "wsd")
"""The schedules that depend on the number of steps of the run."""
SCHEDULES_WITH_WARMUP = ("paper", "inverse-sqrt")
"""The schedules whose formula needs a warm-up of at least one step."""

_DECAY_SHARE = 0.2
_PLATEAU_FACTOR = 0.5
_PLATEAU_PATIENCE = 3
_PLATEAU_THRESHOLD = 1e-4


class Schedule:
    """A learning rate for every step.

    Args:
        rule: learning rate of a step, from 1.
    """

    def __init__(self, rule: Callable[[int], float]) -> None:
        self._rule = rule

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step; before the first step, that of the first."""
        return self._rule(max(1, step))

    def observe(self, value: float) -> None:
        """Take a validation loss into account."""

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""


class Plateau(Schedule):
    """A constant learning rate, halved whenever the validation loss has not fallen for a few validations in a row.

    Args:
        rule: learning rate of a step before any reduction.
    """

    def __init__(self, rule: Callable[[int], float]) -> None:
        super().__init__(rule)
        self._best: float | None = None
        self._misses = 0
        self._reductions = 0

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step with the reductions so far."""
        return super().__call__(step) * float(_PLATEAU_FACTOR**self._reductions)

    def observe(self, value: float) -> None:
        """Reduce the learning rate after too many validation losses in a row without an improvement."""
        if self._best is None or value < self._best - _PLATEAU_THRESHOLD * abs(self._best):
            self._best, self._misses = value, 0
            return
        self._misses += 1
        if self._misses > _PLATEAU_PATIENCE:
            self._misses, self._reductions = 0, self._reductions + 1

    def state(self) -> dict[str, Any]:
        """Return the best loss, the misses since, and the reductions so far."""
        return {"best": self._best, "misses": self._misses, "reductions": self._reductions}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._best = None if state["best"] is None else float(state["best"])
        self._misses, self._reductions = int(state["misses"]), int(state["reductions"])


@dataclass(frozen=True)
class Span:
    """The parameters of a schedule.

    Attributes:
        learning_rate: the peak; a factor for the schedule of the paper.
        warmup: steps of the linear warm-up.
        steps: the last step of the run; None for schedules without an end.
        width: the model's width, for the schedule of the paper.
    """

    learning_rate: float
    warmup: int
    steps: int | None = None
    width: int | None = None

    def rise(self, step: int) -> float:
        """Return the warm-up factor, 1 at its end and after it."""
        return min(1.0, step / self.warmup) if self.warmup else 1.0

    def progress(self, step: int) -> float:
        """Return the progress from the end of the warm-up to the end of the run, from 0 to 1."""
        assert self.steps is not None, "a schedule with an end knows the number of steps"
        return min(1.0, max(0.0, (step - self.warmup) / (self.steps - self.warmup)))


def paper(span: Span, step: int) -> float:
    """width**-0.5 * min(step**-0.5, step * warmup**-1.5), times the learning rate. Source: arXiv 1706.03762, eq. 3."""
    assert span.width is not None, "the schedule of the paper knows the model's width"
    return span.learning_rate * float(span.width**-0.5 * min(step**-0.5, step * span.warmup**-1.5))


def inverse_square_root(span: Span, step: int) -> float:
    """Linear warm-up to the peak, then peak * sqrt(warmup / step): the schedule of the paper with a given peak."""
    return span.learning_rate * min(step / span.warmup, math.sqrt(span.warmup / step))


def cosine(span: Span, step: int) -> float:
    """Linear warm-up, then half a cosine wave down to zero. Source: arXiv 1608.03983, eq. 5, without restarts."""
    return span.learning_rate * span.rise(step) * 0.5 * (1.0 + math.cos(math.pi * span.progress(step)))


def linear(span: Span, step: int) -> float:
    """Linear warm-up, then linear decay to zero."""
    return span.learning_rate * span.rise(step) * (1.0 - span.progress(step))


def warmup_stable_decay(span: Span, step: int) -> float:
    """Linear warm-up, constant peak, then decay to zero, peak * (1 - sqrt(t)), over the last fifth.

    The last fifth is that of the steps after the warm-up. Source: arXiv 2404.06395, section 4 (the three phases);
    arXiv 2405.18392, section 3 (the shape and length of the decay).
    """
    decayed = max(0.0, span.progress(step) - (1.0 - _DECAY_SHARE)) / _DECAY_SHARE
    return span.learning_rate * span.rise(step) * (1.0 - math.sqrt(min(1.0, decayed)))


def constant(span: Span, step: int) -> float:
    """Linear warm-up, then the constant peak."""
    return span.learning_rate * span.rise(step)


RULES: Mapping[str, Callable[[Span, int], float]] = MappingProxyType(
    {
        "paper": paper,
        "inverse-sqrt": inverse_square_root,
        "cosine": cosine,
        "linear": linear,
        "wsd": warmup_stable_decay,
        "constant": constant,
    }
)


def build_schedule(kind: str, *, learning_rate: float, warmup: int, steps: int | None, width: int | None) -> Schedule:
    """Build the schedule of a run.

    Args:
        kind: name of the schedule.
        learning_rate: the peak, positive; for "paper" a factor on the formula, usually 1.
        warmup: steps of the linear warm-up; 0 for none.
        steps: the last step of the run; for SCHEDULES_WITH_AN_END.
        width: the model's width, for "paper".

    Returns:
        the schedule; call it with a step, from 1.

    Raises:
        InputError: a schedule with an end needs more steps.
    """
    if kind in SCHEDULES_WITH_AN_END:
        if steps is None:
            raise InputError(f"the schedule '{kind}' ends at a known step; give the number of steps or epochs")
        if steps <= warmup:
            raise InputError(f"the schedule '{kind}' needs more steps than its warmup of {warmup}, got {steps}")
    span = Span(learning_rate, warmup, steps, width)
    return Plateau(partial(constant, span)) if kind == "plateau" else Schedule(partial(RULES[kind], span))
