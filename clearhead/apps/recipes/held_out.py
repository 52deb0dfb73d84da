"""Held-out examples: drawn at random and by label, so that no text of them is also read in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clearhead.base.errors import InputError
from clearhead.data.sources.held_out import HELD_OUT_SEED, Keys, Labels, draw_rows, group_rows

MOST_HELD_OUT = 1_000
_SHARE = 0.1
# In characters: of a passage, which ends with a paragraph if one ends before twice as many.
_PASSAGE = 2_000


@dataclass(frozen=True)
class HeldOut:
    """Which examples go where.

    Attributes:
        train, valid: their rows, in order; nothing is held out where `valid` is empty.
        num_shared: examples that have a text of another one, so that both are in the same part.
    """

    train: Sequence[int]
    valid: Sequence[int] = ()
    num_shared: int = 0

    def copies(self, folder: Path, ending: str, texts: Sequence[str]) -> dict[Path, Sequence[str]]:
        """Return the texts of both parts by the paths of their copies, first those of training.

        Args:
            folder, ending: of the copies.
            texts: of all examples.
        """
        rows = {"train": self.train, "valid": self.valid}
        return {folder / f"{name}.{ending}": [texts[row] for row in rows[name]] for name in rows}

    def note(self, what: str) -> str:
        """Return the comment on the validation data."""
        if not self.valid:
            return ""
        return (
            f"{len(self.valid)} of your {what}, drawn at random (seed {HELD_OUT_SEED}); training reads no text of them"
        )


def draw(keys: Keys, labels: Labels = None) -> HeldOut:
    """Draw a tenth of the examples, and no more than a score that can be trusted needs.

    Args:
        keys: of each example; two with a key in common are never in different parts, one without a key is in training.
        labels: of which each gets its share; None: there are none.

    Raises:
        InputError: the examples have so much in common that none can be held out.
    """
    wanted = min(MOST_HELD_OUT, max(1, round(_SHARE * len(keys))))
    held = draw_rows(keys, wanted / len(keys), labels)
    if not held:
        raise InputError(
            "nothing can be held out for validation: every example has a text in common with many others; give "
            "validation data"
        )
    rows = range(len(keys))
    drawn = set(held)
    shared = sum(len(group) for group in group_rows(keys) if len(group) > 1)
    return HeldOut([row for row in rows if row not in drawn], held, shared)


def passages(lines: Sequence[str]) -> list[str]:
    """Put the lines of a text together into passages."""
    texts: list[str] = []
    passage: list[str] = []
    length = 0
    for line in lines:
        passage.append(line)
        length += len(line) + 1
        if length >= 2 * _PASSAGE or (length >= _PASSAGE and not line.strip()):
            texts.append("\n".join(passage))
            passage, length = [], 0
    if passage:
        texts.append("\n".join(passage))
    return texts


def num_overlapping(train: Keys, valid: Keys) -> int:
    """Return how many validation examples have a key of a training example."""
    known = {key for example in train for key in example}
    return sum(not known.isdisjoint(example) for example in valid)
