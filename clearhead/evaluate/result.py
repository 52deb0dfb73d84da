"""The result of a validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clearhead.printing import block, short


@dataclass(frozen=True)
class Validation:
    """Loss and score on held-out data.

    Attributes:
        loss: mean loss per label, in nats.
        score: a number where higher is better, or None.
    """

    loss: float
    score: float | None = None


class Measures(dict[str, Any]):
    """The numbers of an evaluation by their names, printed with one in each line."""

    def __repr__(self) -> str:
        return block(f"{name}: {short(value)}" for name, value in self.items())
