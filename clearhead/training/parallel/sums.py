"""What the processes of a training tell each other after each step: its sums, and whether it was the last one."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Sums:
    """The sums of one step.

    Args:
        loss: summed over the labels; not finite as soon as that of one batch is not.
        num_labels: labels that were predicted.
        num_tokens: source and target tokens.
        not_finite: the number of the first batch whose loss is not finite; 0: all are.
    """

    loss: float = 0.0
    num_labels: int = 0
    num_tokens: int = 0
    not_finite: int = 0

    def add(self, loss: float, num_labels: int, num_tokens: int, number: int) -> None:
        """Add one batch, counted from 1."""
        self.loss += loss
        self.num_labels += num_labels
        self.num_tokens += num_tokens
        if not math.isfinite(loss) and not self.not_finite:
            self.not_finite = number

    def row(self) -> list[float]:
        """Return the sums as numbers."""
        return [self.loss, float(self.num_labels), float(self.num_tokens), float(self.not_finite)]

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> Sums:
        """Return the sums over the rows of all processes, added up in the order of their ranks."""
        losses, labels, tokens, numbers = zip(*(row[:4] for row in rows), strict=True)
        first = min((int(number) for number in numbers if number), default=0)
        return cls(sum(losses), int(sum(labels)), int(sum(tokens)), first)


@dataclass(frozen=True)
class Agreed:
    """What ends a training of several processes, as all of them know it.

    Args:
        seconds: of the run, by the clock of the first process.
        signal: that one of them received; None: none did.
    """

    seconds: float = 0.0
    signal: signal.Signals | None = None

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> Agreed:
        """Return it from the rows of all processes, whose last two numbers are the signal, or 0, and the seconds."""
        number = int(max(row[-2] for row in rows))
        return cls(rows[0][-1], signal.Signals(number) if number else None)
