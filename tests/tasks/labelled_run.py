"""Texts whose label stands in one of their words, and small run files for the tasks on labelled text."""

from __future__ import annotations

import random
from pathlib import Path

WORDS = [2 * letter for letter in "abcdefghijk"]
RUN_FILE = """
[task]
{task}
[data]
train = {{ text = "{folder}/train.{ending}"{labels} }}
valid = {valid}
max_length = 17
[tokenizer]
kind = "word"
[model]
family = "{family}"
norm_place = "pre"
positions = "rotary"
layers = 1
width = 28
heads = 2
feedforward = 31
dropout = 0.0
[train]
run = "{folder}/run"
steps = {steps}
batch_tokens = 331
learning_rate = 1e-2
warmup = 5
validate_every = {steps}
device = "cpu"
"""


def noise(draw: random.Random, count: int) -> list[str]:
    """Some words without a meaning."""
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
    """Write a run file over train and valid files of a folder."""
    table = f'{{ text = "{folder}/valid.{ending}"{labels} }}'
    path = folder / "run.toml"
    path.write_text(
        RUN_FILE.format(
            folder=folder, task=task, family=family, ending=ending, labels=labels, valid=valid or table, steps=steps
        ),
        encoding="utf-8",
    )
    return path


def write_columns(folder: Path, rows: list[tuple[str, ...]], names: tuple[str, ...], *, train: int) -> None:
    """Write rows as train.tsv and valid.tsv, the first of them for training."""
    for part, chosen in (("train", rows[:train]), ("valid", rows[train:])):
        lines = ["\t".join(row) for row in [names, *chosen]]
        (folder / f"{part}.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
