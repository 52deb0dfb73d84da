"""Learning-rate schedules: functions of the step, and a schedule that depends on the validation loss."""

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
    """Learning-rate schedule: computes the learning rate of each step.

    Args:
        rule: a function from the step, counted from 1, to its learning rate.
    """

    def __init__(self, rule: Callable[[int], float]) -> None:
        self._rule = rule

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step; step 0 has the learning rate of step 1."""
        return self._rule(max(1, step))

    def observe(self, value: float) -> None:
        """Take note of a validation loss, which may lower later learning rates; most schedules ignore it."""

    def state(self) -> dict[str, Any]:
        """Return the state of the schedule as JSON values."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `state` returned."""


class Plateau(Schedule):
    """A schedule that halves the learning rate if the validation loss has not fallen for a few validations in a row.

    Args:
        rule: a function from the step, counted from 1, to its learning rate before any reduction.
    """

    def __init__(self, rule: Callable[[int], float]) -> None:
        super().__init__(rule)
        self._best: float | None = None
        self._misses = 0
        self._reductions = 0

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step after the reductions so far."""
        return super().__call__(step) * float(_PLATEAU_FACTOR**self._reductions)

    def observe(self, value: float) -> None:
        """Take note of a validation loss; the fourth loss in a row without improvement halves the learning rate."""
        if self._best is None or value < self._best - _PLATEAU_THRESHOLD * abs(self._best):
            self._best, self._misses = value, 0
            return
        self._misses += 1
        if self._misses > _PLATEAU_PATIENCE:
            self._misses, self._reductions = 0, self._reductions + 1

    def state(self) -> dict[str, Any]:
        """Return the best loss, the validations without improvement since then, and the number of reductions."""
        return {"best": self._best, "misses": self._misses, "reductions": self._reductions}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `state` returned."""
        self._best = None if state["best"] is None else float(state["best"])
        self._misses, self._reductions = int(state["misses"]), int(state["reductions"])


@dataclass(frozen=True)
class Span:
    """Values that the formula of a schedule uses: learning rate, warm-up, last step and model width.

    Attributes:
        learning_rate: the peak learning rate; for the schedule "paper" a factor of the formula, usually 1.
        warmup: the number of steps of the linear warm-up.
        steps: the last step of the run. None for schedules without an end.
        width: the width of the model, for the schedule "paper". None for other schedules.
    """

    learning_rate: float
    warmup: int
    steps: int | None = None
    width: int | None = None

    def rise(self, step: int) -> float:
        """Return the warm-up factor of a step: it rises to 1 and stays there."""
        return min(1.0, step / self.warmup) if self.warmup else 1.0

    def progress(self, step: int) -> float:
        """Return the progress of a step from the end of the warm-up (0) to the end of the run (1)."""
        assert self.steps is not None, "a schedule with an end needs the number of steps"
        return min(1.0, max(0.0, (step - self.warmup) / (self.steps - self.warmup)))


def paper(span: Span, step: int) -> float:
    """Return learning_rate * width**-0.5 * min(step**-0.5, step * warmup**-1.5). Source: arXiv 1706.03762, eq. 3."""
    assert span.width is not None, "the schedule 'paper' needs the width of the model"
    return span.learning_rate * float(span.width**-0.5 * min(step**-0.5, step * span.warmup**-1.5))


def inverse_square_root(span: Span, step: int) -> float:
    """Return the rate of a linear warm-up to the peak, then peak * sqrt(warmup / step)."""
    return span.learning_rate * min(step / span.warmup, math.sqrt(span.warmup / step))


def cosine(span: Span, step: int) -> float:
    """Return the rate of a linear warm-up, then half a cosine down to 0. Source: arXiv 1608.03983, eq. 5."""
    return span.learning_rate * span.rise(step) * 0.5 * (1.0 + math.cos(math.pi * span.progress(step)))


def linear(span: Span, step: int) -> float:
    """Return the rate of a linear warm-up, then linear decay to 0."""
    return span.learning_rate * span.rise(step) * (1.0 - span.progress(step))


def warmup_stable_decay(span: Span, step: int) -> float:
    """Return the rate of a linear warm-up, a constant peak, then a decay to 0, peak * (1 - sqrt(t)).

    The decay takes the last fifth of the steps after the warm-up. Source: arXiv 2404.06395, section 4 (the three
    phases); arXiv 2405.18392, section 3 (shape and length of the decay).
    """
    decayed = max(0.0, span.progress(step) - (1.0 - _DECAY_SHARE)) / _DECAY_SHARE
    return span.learning_rate * span.rise(step) * (1.0 - math.sqrt(min(1.0, decayed)))


def constant(span: Span, step: int) -> float:
    """Return the rate of a linear warm-up, then the constant peak."""
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
        kind: the name of the schedule.
        learning_rate: the peak learning rate, positive; for "paper" a factor of the formula, usually 1.
        warmup: the number of steps of the linear warm-up; 0 means none.
        steps: the last step of the run, for SCHEDULES_WITH_AN_END. None means that it is not known.
        width: the width of the model, for "paper". None for other schedules.

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
