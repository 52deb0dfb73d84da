"""What may follow in a sequence, as a running batch knows it: a mask of tokens before each choice.

Shapes: V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from jaxtyping import Bool
from torch import Tensor


class Constraint(ABC):
    """What may follow in one sequence; it belongs to that sequence alone."""

    @abstractmethod
    def allowed(self) -> Bool[Tensor, " vocab"]:
        """Return which tokens may be next, on the CPU; an end token only where the sequence is whole."""

    @abstractmethod
    def take(self, token: int) -> None:
        """Go on behind a token that was allowed and is no end token."""


BeginConstraint = Callable[[], Constraint]
"""Gives each sequence a constraint of its own."""
