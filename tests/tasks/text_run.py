"""Text in which every word follows from its neighbours, and small run files for the tasks on plain text."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from clearhead.data.batches.base import Batch
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.progress.reports import TrainingProgress
from clearhead.training.runfile.read import load_run_file
from clearhead.training.task_setup import PreparedTask, TaskSetup, prepare_task
from tests.tasks.tiny_run import write_tiny_run

WORDS = [2 * letter for letter in "abcdefghijklmnopqrstuvw"]


def write_text(folder: Path) -> None:
    """Write lines of consecutive words, with random start and length."""
    draw = random.Random(3)
    for split, count in (("train", 211), ("valid", 53)):
        lines = []
        for _ in range(count):
            start, length = draw.randrange(len(WORDS)), draw.randint(5, 11)
            lines.append(" ".join(WORDS[(start + position) % len(WORDS)] for position in range(length)))
        (folder / f"{split}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def run_file(folder: Path, task: str, family: str, *, steps: int = 60) -> Path:
    """Write the text and a run file for it."""
    write_text(folder)
    tables = {split: f'{{ text = "{folder}/{split}.txt", document = "line" }}' for split in ("train", "valid")}
    return write_tiny_run(folder, task=task, family=family, max_length=13, learning_rate=2e-2, steps=steps, **tables)


def parts_from(path: Path, tokenizer: Tokenizer | None = None) -> PreparedTask[Batch]:
    """Return the prepared task of a run file, with a trained or a given tokenizer."""
    pair = None if tokenizer is None else TokenizerPair(source=tokenizer, target=tokenizer, joint=True)
    setup = TaskSetup(
        run_file=load_run_file(path),
        find_tokenizers=lambda train: pair or train(),
        initial=None,
        progress=TrainingProgress(),
        device=torch.device("cpu"),
    )
    return prepare_task(setup)
