"""Counts of tokens, query-key pairs and outputs in batches of sequences, from which FLOPs are computed.

Few long sequences cost more than many short ones with the same number of tokens, since they have more pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

PREFIX: Final = "work."
"""Prefix of the entries with token counts in a run's checkpoints."""


@dataclass(frozen=True)
class TokenCounts:
    """Counts of tokens, query-key pairs and outputs in one or more batches, without padding.

    Attributes:
        tokens: the number of tokens that a run reports as its progress.
        first_tokens: the number of tokens that the first stack reads (the encoder, or the only stack).
        first_pairs: the number of query-key pairs in the first stack. Both tokens belong to one sequence, or to one
            document if a block holds several.
        second_tokens, second_pairs: the numbers of tokens and query-key pairs of the decoder of a two-stack model.
        memory_pairs: the number of pairs of a decoder token and an encoder token.
        outputs: the number of positions with a label.
        sequences: the number of rows of the batches; models with a pool have one output per row.
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
        """Return the counts scaled to a text of the same kind with another number of tokens.

        Args:
            tokens: the number of tokens of that text, in the unit of the attribute `tokens`.
        """
        return TokenCounts(*(getattr(self, field.name) * tokens / self.tokens for field in fields(self)))

    def choices(self) -> dict[str, int | float]:
        """Return the counts as entries for the dictionary of choices that a checkpoint stores."""
        return {f"{PREFIX}{name}": value for name, value in asdict(self).items()}

    @classmethod
    def from_choices(cls, choices: Mapping[str, Any]) -> TokenCounts | None:
        """Return the token counts from entries that `choices` returned; None if an entry is missing."""
        entries = {field.name: choices.get(f"{PREFIX}{field.name}") for field in fields(cls)}
        numbers = {name: value for name, value in entries.items() if isinstance(value, int | float)}
        return cls(**numbers) if len(numbers) == len(entries) and numbers["tokens"] > 0 else None
