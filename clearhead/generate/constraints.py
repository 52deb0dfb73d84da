"""What may follow in a sequence, as a running batch knows it: a mask of tokens before each choice.

Shapes: V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from jaxtyping import Bool
from torch import Tensor

from clearhead.base.errors import InputError


class Constraint(ABC):
    """What may follow in one sequence; it belongs to that sequence alone."""

    @abstractmethod
    def allowed(self) -> Bool[Tensor, " vocab"]:
        """Return which tokens may be next, on the CPU; an end token only where the sequence is whole."""

    @abstractmethod
    def take(self, token: int) -> None:
        """Advance by one allowed token (not an end token)."""

    @property
    @abstractmethod
    def failure(self) -> InputError | None:
        """The reason why no token is allowed any more, if the constraint itself is it."""


BeginConstraint = Callable[[], Constraint]
"""Gives each sequence a constraint of its own."""
