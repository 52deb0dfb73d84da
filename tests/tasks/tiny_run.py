"""Run file for any task and data with which training takes a second."""

from __future__ import annotations

from pathlib import Path

RUN_FILE = """
[task]
{task}
[data]
train = {train}
valid = {valid}
max_length = {max_length}
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
learning_rate = {learning_rate}
warmup = 5
validate_every = {steps}
device = "cpu"
"""


def write_tiny_run(folder: Path, **values: object) -> Path:
    """Write a run file into a folder; `values` fill `RUN_FILE`, and data are given as tables."""
    path = folder / "run.toml"
    path.write_text(RUN_FILE.format(folder=folder, **values), encoding="utf-8")
    return path
