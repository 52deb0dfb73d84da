"""Texts in which one word decides the label, and small run files for tasks on labelled text."""

from __future__ import annotations

import random
from pathlib import Path

from tests.tasks.tiny_run import write_tiny_run

WORDS = [2 * letter for letter in "abcdefghijk"]


def noise(draw: random.Random, count: int) -> list[str]:
    """Return random words that do not affect the label."""
    return draw.choices(WORDS, k=count)


def write_run_file(
    folder: Path,
    task: str,
    family: str,
    *,
    ending: str = "tsv",
    labels: str = ', labels = "label"',
    valid: str | None = None,
    steps: int = 60,
) -> Path:
    """Write a run file that trains on the train and valid files of a folder."""
    train, default = (f'{{ text = "{folder}/{split}.{ending}"{labels} }}' for split in ("train", "valid"))
    tables = {"train": train, "valid": valid or default}
    return write_tiny_run(folder, task=task, family=family, max_length=17, learning_rate=1e-2, steps=steps, **tables)


def write_columns(folder: Path, rows: list[tuple[str, ...]], names: tuple[str, ...], *, train: int) -> None:
    """Write the first rows to train.tsv and the rest to valid.tsv."""
    for split, chosen in (("train", rows[:train]), ("valid", rows[train:])):
        lines = ["\t".join(row) for row in [names, *chosen]]
        (folder / f"{split}.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
