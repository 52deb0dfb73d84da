"""Description of the task: its facts, and the help texts of its commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from clearhead.spec.tasks.base import Architecture, EvaluateWords, NewWords, Recipe, Size, Task, Value

_MODEL: Final = Architecture(
    {"norm": "rms", "norm_place": "pre", "positions": "rotary", "activation": "silu", "gated": True},
    saved_as="eurobert",
)
_TRAIN: Final[Mapping[str, Value]] = {
    "optimizer": "adamw", "schedule": "cosine", "warmup": 0.1, "clip": 1.0, "learning_rate": 2e-3,
    "weight_decay": 0.1, "batch_tokens": 2048, "metric": "score",
}  # fmt: skip
_SETTINGS: Final[Mapping[str, Value]] = {"pool": "mean", "loss": "absolute"}
_DATA: Final = """  ratings.tsv     a table; its first line names the columns: text and number
  ratings.jsonl   {"text": "A fine film.", "number": 4.5} in each line"""

TASK: Final = Task(
    kind="rate",
    home="clearhead_rate",
    outputs="vector",
    learns_head=True,
    smooths_labels=False,
    families=("encoder", "decoder"),
    new=NewWords(
        "Write a run file that trains a model to rate texts with numbers.",
        examples=("--text ratings.tsv", "--text ratings.tsv --number stars"),
        data=_DATA,
        needed=("text",),
        optional=("number", "valid_text"),
        comments={"pool": "states that represent the text: first | mean | last", "loss": "absolute | squared"},
        longer="longer texts are truncated",
    ),
    evaluate=EvaluateWords(("text",), "mean absolute error, correlation", ("number", "batch_size")),
    options={"number": "The column or field of the numbers."},
    used_with="predict {run} FILE",
    recipes=(
        Recipe(5_000, "bpe", 4_000, 256, (Size(2, 64, 4, 128, 0.2),), _MODEL, _TRAIN, most_epochs=30, task=_SETTINGS),
        Recipe(None, "bpe", 8_000, 256, (Size(3, 128, 4, 256, 0.1),), _MODEL, _TRAIN, most_epochs=10, task=_SETTINGS),
    ),
    score="correlation",
)
