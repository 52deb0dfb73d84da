"""How many tokens, pairs and outputs some text has: with a spec, these numbers give the FLOPs of computing it.

Text of the same size costs more as few long sequences than as many short ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

PREFIX: Final = "work."
"""Of the entries in a run's checkpoints that hold its token counts."""


@dataclass(frozen=True)
class TokenCounts:
    """Tokens, pairs and outputs of some text, without padding.

    Attributes:
        tokens: as a run counts the tokens it saw.
        first_tokens: read by the first stack: the encoder, or the only one.
        first_pairs: of a query and a key of one sequence (of one document, where a block holds several) there.
        second_tokens, second_pairs: the same for the decoder of a model with two stacks.
        memory_pairs: of a token of the decoder and a token of the encoder.
        outputs: positions that have a label.
        sequences: rows of the batches, each with one output in a model that answers once for a sequence.
    """

    tokens: int | float = 0
    first_tokens: int | float = 0
    first_pairs: int | float = 0
    second_tokens: int | float = 0
    second_pairs: int | float = 0
    memory_pairs: int | float = 0
    outputs: int | float = 0
    sequences: int | float = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def scale_to(self, tokens: int | float) -> TokenCounts:
        """Return the counts of more text of the same kind.

        Args:
            tokens: how much text, as a run counts the tokens it saw.
        """
        return TokenCounts(*(getattr(self, field.name) * tokens / self.tokens for field in fields(self)))

    def choices(self) -> dict[str, int | float]:
        """Return the counts as entries of a checkpoint's choices."""
        return {f"{PREFIX}{name}": value for name, value in asdict(self).items()}

    @classmethod
    def from_choices(cls, choices: Mapping[str, Any]) -> TokenCounts | None:
        """Take back what `choices` returned, or None if an entry is missing."""
        entries = {field.name: choices.get(f"{PREFIX}{field.name}") for field in fields(cls)}
        numbers = {name: value for name, value in entries.items() if isinstance(value, int | float)}
        return cls(**numbers) if len(numbers) == len(entries) and numbers["tokens"] > 0 else None
