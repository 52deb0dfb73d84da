"""What the benchmark of inference does: its inputs, and how much work they are. Only the standard library is needed."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

CASES = ("decode-1", "decode-8", "decode-32", "prompt-512", "translate-1", "translate-64x4", "embed")
VOCABULARY, TARGET, NEW_TOKENS = 32_000, 25, 100
"""Entries of the translation model, tokens of its texts, tokens after a prompt."""


@dataclass(frozen=True)
class Job:
    """What one process does.

    Args:
        library: whose code runs.
        precision: of it, in its own words.
        compiled: whether its module is compiled.
        case: one of `CASES`.
        folder: of the checkpoint, in the format of the library.
        texts: a file with texts to embed.
        threads: of the CPU.
    """

    library: str
    precision: str
    compiled: bool
    case: str
    folder: str
    texts: str
    threads: int

    @property
    def name(self) -> str:
        """The side in a table."""
        return f"{self.library} {self.precision}{' compiled' if self.compiled else ''}"

    @property
    def kind(self) -> str:
        """The case without its sizes."""
        return self.case.partition("-")[0]

    @property
    def rows_and_beams(self) -> tuple[int, int]:
        """Texts at a time, and beams of each."""
        rows, _, beams = self.case.partition("-")[2].partition("x")
        return int(rows), int(beams or 1)

    def prompts(self) -> tuple[list[list[int]], int]:
        """Return the ids that a decoder reads, and how many tokens follow each."""
        size = int(self.case.partition("-")[2])
        return (ids_of(1, size), 1) if self.kind == "prompt" else (ids_of(size, 32), NEW_TOKENS)

    def sources(self) -> list[list[int]]:
        """Return the ids of sentences to translate."""
        return ids_of(self.rows_and_beams[0], TARGET)

    def sentences(self) -> list[str]:
        """Return the texts to embed."""
        if self.texts:
            return Path(self.texts).read_text("utf-8").splitlines()[:1000]
        return [f"A man in a shirt number {number} walks his dog along the street." for number in range(1000)]

    def work(self) -> int:
        """Return the tokens, or the sentences, of one run."""
        if self.kind == "embed":
            return len(self.sentences())
        if self.kind == "translate":
            return self.rows_and_beams[0] * TARGET
        prompts, count = self.prompts()
        return len(prompts[0]) if self.kind == "prompt" else len(prompts) * count

    def as_json(self) -> str:
        """Return what `from_json` reads."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read what `as_json` wrote."""
        return cls(**json.loads(text))


def ids_of(rows: int, tokens: int) -> list[list[int]]:
    """Return random ids, the same every time."""
    chance = random.Random(1)
    return [[chance.randrange(10, VOCABULARY - 10) for _ in range(tokens)] for _ in range(rows)]
