"""A small invented library of Python files for the demos, and settings with which they take seconds."""

from __future__ import annotations

import random
from pathlib import Path

WORDS = ("value", "name", "path", "index", "result", "items", "parser", "reader")
TINY = (
    *("train.steps=3", "train.warmup=1", "train.validate_every=2", "train.batch_tokens=257", "model.width=16"),
    *("model.heads=2", "model.layers=1", "model.feedforward=23", "tokenizer.vocab_size=307", "data.max_length=61"),
)


def write_library(folder: Path, count: int = 61) -> Path:
    """Write modules that look like code; about one of twenty will be held out."""
    source = random.Random(7)
    folder.mkdir()
    for number in range(count):
        functions = []
        for position in range(3):
            first, second, third = source.sample(WORDS, 3)
            loop = (
                f"    for {first} in range(len({second})):\n        {third} = {second}[{first}]\n" if position else ""
            )
            functions.append(
                f"def read_{first}({second}, {third}):\n    if {second} is None:\n        return {third}\n"
                f"{loop}    return {third}\n"
            )
        (folder / f"module{number}.py").write_text("\n\n".join(functions), encoding="utf-8")
    return folder
