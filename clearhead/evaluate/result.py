"""The result of a validation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Validation:
    """Loss and score on held-out data.

    Attributes:
        loss: mean loss per label, in nats.
        score: a number where higher is better, or None.
    """

    loss: float
    score: float | None = None
