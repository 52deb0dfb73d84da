"""A training small enough for a test: a tiny module, shuffled batches and a fixed learning rate.

Shape suffixes: B batch, T length.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.generate.scoring.result import Validation
from clearhead.training.loop import Trainer
from clearhead.training.optim.schedules import Schedule
from clearhead.training.progress.reports import RunPlan, StepReport, TrainingProgress, ValidationReport
from clearhead.training.record import TrainSettings

VOCABULARY, WIDTH = 13, 7


class NextToken(nn.Module):
    """Predicts a token from the one before; its table is tied to its head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        hidden = self.table(ids_BT)
        return self.head(hidden + self.dropout(torch.tanh(self.mix(hidden))))


@dataclass(frozen=True)
class Tokens:
    ids_BT: Tensor
    labels_BT: Tensor

    @property
    def num_tokens(self) -> int:
        return self.ids_BT.numel()


class ShuffledTokens:
    """Batches of unequal size over fixed random text, in an order of its own in every epoch."""

    def __init__(self, *, num_batches: int = 5, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._texts = [
            torch.randint(0, VOCABULARY, (2 + index % 3, 5 + index), generator=generator)
            for index in range(num_batches)
        ]
        self._seed, self._epoch, self._place = seed, 0, 0

    @property
    def batches_per_epoch(self) -> int:
        return len(self._texts)

    def __next__(self) -> Tokens:
        order = list(range(len(self._texts)))
        random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        text_BT = self._texts[order[self._place]]
        self._place += 1
        if self._place == len(order):
            self._epoch, self._place = self._epoch + 1, 0
        return Tokens(text_BT[:, :-1], text_BT[:, 1:])

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "place": self._place}

    def load_state(self, state: dict[str, Any]) -> None:
        self._epoch, self._place = state["epoch"], state["place"]


class Falling(Schedule):
    """A learning rate that falls with the step, and remembers what it observed."""

    def __init__(self, first: float = 0.02) -> None:
        self.first = first
        self.observed: list[float] = []

    def __call__(self, step: int) -> float:
        return self.first / (1 + 0.1 * step)

    def observe(self, value: float) -> None:
        self.observed.append(value)

    def state(self) -> dict[str, Any]:
        return {"observed": self.observed}

    def load_state(self, state: dict[str, Any]) -> None:
        self.observed = list(state["observed"])


@dataclass
class Recorder(TrainingProgress):
    """Keeps every report."""

    plans: list[RunPlan] = field(default_factory=list)
    steps: list[StepReport] = field(default_factory=list)
    validations: list[ValidationReport] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    ended: int = 0

    def begin(self, plan: RunPlan) -> None:
        self.plans.append(plan)

    def step(self, report: StepReport) -> None:
        self.steps.append(report)

    def end_validation(self, report: ValidationReport) -> None:
        self.validations.append(report)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def end(self) -> None:
        self.ended += 1


def sum_loss(module: nn.Module, batch: Tokens) -> tuple[Tensor, int]:
    logits_BTV = module(batch.ids_BT)
    loss = F.cross_entropy(logits_BTV.flatten(0, 1), batch.labels_BT.flatten(), reduction="sum")
    return loss, batch.labels_BT.numel()


def validation(module: nn.Module) -> Validation:
    """Loss on one fixed text; it draws random numbers, as a careless validation might."""
    torch.rand(3), random.random()
    text_BT = torch.arange(VOCABULARY).repeat(3, 2)
    loss, num_labels = sum_loss(module, Tokens(text_BT[:, :-1], text_BT[:, 1:]))
    return Validation(loss.item() / num_labels, score=100 * float(torch.exp(-loss / num_labels)))


def small_trainer(
    run: Path,
    *,
    validate: Callable[[nn.Module], Validation] = validation,
    loss: Callable[[nn.Module, Tokens], tuple[Tensor, int]] = sum_loss,
    **changes: Any,
) -> Trainer[Tokens]:
    """A trainer over fresh parts; two of them with the same settings train the same weights."""
    torch.manual_seed(17)
    module = NextToken()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0, weight_decay=0.01)
    defaults = {"steps": 12, "clip": 1.0, "validate_every": 4, "log_every": 3, "plots": False}
    settings = TrainSettings(run=str(run), **(defaults | changes))
    return Trainer(module, optimizer, Falling(), ShuffledTokens(), loss, validate, settings, Recorder())


def recorder(trainer: Trainer[Tokens]) -> Recorder:
    assert isinstance(trainer.progress, Recorder)
    return trainer.progress


def equal_states(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
