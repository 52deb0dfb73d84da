"""Train a tiny compiled run whole, and begin and resume another one; print digests of the weights as JSON.

Run as python -m tests.laws.compiled_resume_job FOLDER begin, then with `resume` in another process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import clearhead as ch
from clearhead.checkpoints.runs.checkpoint import WEIGHTS, checkpoint_folder, read_choices
from clearhead.checkpoints.runs.manifest import sha256_of

STEPS = 4


def table_of(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """Return the run file of a decoder on texts with batches of one length; the last batch of an epoch is short."""
    text = folder / "text.txt"
    text.write_text("ein hund bellt laut und zwei hunde bellen leise\n" * 16, encoding="utf-8")
    return {
        "task": {"kind": "generate"},
        "data": {"train": {"text": str(text)}, "valid": 0.2, "max_length": 16},
        "tokenizer": {"kind": "character"},
        "model": {"layers": 1, "width": 8, "heads": 2, "feedforward": 12, "dropout": 0.1},
        "train": {
            "run": str(folder / name), "steps": steps, "batch_tokens": 128, "validate_every": 2, "warmup": 1,
            "threads": 1, "device": "cpu", "snapshots": 0, "compile": True, "ema": 0.9,
            "accumulate": 2,
        },
    }  # fmt: skip


def digest(run: Path) -> str:
    """Return the digest of the weights after the last step."""
    return sha256_of(checkpoint_folder(run, STEPS) / WEIGHTS)


def main() -> None:
    """Train, and print the digest of the whole or of the resumed run with its remembered choice."""
    folder, action = Path(sys.argv[1]), sys.argv[2]
    if action == "begin":
        ch.train(table_of(folder, "whole", STEPS))
        ch.train(table_of(folder, "halves", STEPS // 2))
        report: dict[str, Any] = {"whole": digest(folder / "whole")}
    else:
        # A resumed run takes its choice from the checkpoint.
        table = table_of(folder, "halves", STEPS)
        table["train"]["compile"] = "auto"
        ch.train(table, resume=True)
        report = {"resumed": digest(folder / "halves")}
    choices = read_choices(folder / "halves")
    assert choices is not None
    print(json.dumps({**report, "choice": choices["compile"]}))


if __name__ == "__main__":
    main()
