"""Data and a run file so small that training takes a second."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from clearhead.apps.cli.main import main

PAIRS = [(f"{left} {middle} {right}", f"{right} {left}") for left in "abcde" for middle in "mnopq" for right in "uvwxy"]
SIZES = """
[model]
layers = 1
width = 14
heads = 2
feedforward = 22
dropout = 0.1
"""


def write_pairs(folder: Path, name: str, pairs: list[tuple[str, str]]) -> None:
    """Write two line-aligned files, name.source and name.target."""
    (folder / f"{name}.source").write_text("".join(f"{source}\n" for source, _ in pairs), encoding="utf-8")
    (folder / f"{name}.target").write_text("".join(f"{target}\n" for _, target in pairs), encoding="utf-8")


def write_run_file(
    folder: Path, train: str = "steps = 6\nvalidate_every = 3\nkeep = 5\n", tokenizer: str = 'kind = "word"'
) -> Path:
    """Write data and a small run file into a folder; every path in it is absolute."""
    write_pairs(folder, "train", PAIRS[:100])
    write_pairs(folder, "valid", PAIRS[100:])
    file = folder / "run.toml"
    file.write_text(
        f"""\
[task]
kind = "translate"
[data]
train = {{ source = "{folder}/train.source", target = "{folder}/train.target" }}
valid = {{ source = "{folder}/valid.source", target = "{folder}/valid.target" }}
max_length = 16
[tokenizer]
{tokenizer}
{SIZES}
[train]
run = "{folder}/run"
batch_tokens = 101
{train}""",
        encoding="utf-8",
    )
    return file


def train(file: Path, *overrides: str) -> None:
    """Train from a run file; a failure shows the command's messages, which pytest hides for fixtures."""
    with contextlib.redirect_stderr(io.StringIO()) as log:
        code = main(["train", str(file), *overrides])
    assert code == 0, log.getvalue()
