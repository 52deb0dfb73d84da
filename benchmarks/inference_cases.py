"""Cases of the inference benchmark: inputs and amount of work. Imports only the standard library."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

CASES = ("decode-1", "decode-8", "decode-32", "prompt-512", "translate-1", "translate-64x4", "embed")
VOCABULARY, TARGET, NEW_TOKENS = 32_000, 25, 100
"""Vocabulary of the translation model, tokens of its texts, tokens after a prompt."""


@dataclass(frozen=True)
class Job:
    """Work of one process.

    Args:
        library: the library that runs.
        precision: the precision, in the words of the library.
        compiled: True if the module is compiled.
        case: the case, one of `CASES`.
        folder: the folder of the checkpoint, in the format of the library.
        tokenizer: the folder of the tokenizer.
        texts: the prompts, sentences to translate, or texts to embed.
        threads: the number of CPU threads.
        device: the device that runs, as torch.device reads it.
        count: the number of new tokens after a prompt.
        top_p: the probability mass to sample from. None means greedy.
        batch_size: the number of texts that are embedded together. None means the default of the library.
    """

    library: str
    precision: str
    compiled: bool
    case: str
    folder: str
    tokenizer: str
    texts: list[str]
    threads: int
    device: str = "cpu"
    count: int = NEW_TOKENS
    top_p: float | None = None
    batch_size: int | None = None

    @property
    def name(self) -> str:
        """Name of the side in the table."""
        return f"{self.library} {self.precision}{' compiled' if self.compiled else ''}"

    @property
    def kind(self) -> str:
        """Kind of the case, without its sizes."""
        return self.case.partition("-")[0]

    @property
    def rows_and_beams(self) -> tuple[int, int]:
        """Batch size, and beams per text."""
        rows, _, beams = self.case.partition("-")[2].partition("x")
        return int(rows), int(beams or 1)

    @property
    def new_tokens(self) -> int:
        """Number of new tokens per text."""
        return {"prompt": 1, "translate": TARGET}.get(self.kind, self.count)

    def work(self) -> int:
        """Return the number of tokens, or of sentences, of one run."""
        if self.kind == "embed":
            return len(self.texts)
        return read_tokens(self.case) if self.kind == "prompt" else len(self.texts) * self.new_tokens

    def as_json(self) -> str:
        """Return the job as JSON for `from_json`."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that `as_json` wrote."""
        return cls(**json.loads(text))


def read_tokens(case: str) -> int:
    """Return the number of tokens of each text of a case, including the end token of a translation."""
    kind, _, size = case.partition("-")
    return {"prompt": int(size or 0) if kind == "prompt" else 0, "translate": TARGET}.get(kind, 32)


def texts_of(case: str, words: list[str], file: str) -> list[str]:
    """Return the texts of a case, which are always the same.

    Args:
        case: the case, one of `CASES`.
        words: words that are one token each.
        file: a file with one text per line, to embed; empty means generated texts.
    """
    kind, _, size = case.partition("-")
    if kind == "embed":
        if file:
            return Path(file).read_text("utf-8").splitlines()[:1000]
        return [f"A man in a shirt number {number} walks his dog along the street." for number in range(1000)]
    chance, rows = random.Random(1), 1 if kind == "prompt" else int(size.partition("x")[0])
    if kind == "translate":
        return [" ".join(chance.choices(words, k=TARGET - 1)) for _ in range(rows)]
    return ["".join(f" {word}" for word in chance.choices(words, k=read_tokens(case))) for _ in range(rows)]
