"""Description of the task answer: find the span of a text that answers a question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from clearhead.spec.tasks.base import Architecture, EvaluateWords, NewWords, Recipe, Size, Task, Value
from clearhead.tasks.recipe_parts import GATED, WORDS_TRAIN

# The same layers as in other encoders; UltraBERT has a class for question answering.
_MODEL: Final = Architecture(GATED, saved_as="ultrabert")
_TRAIN: Final[Mapping[str, Value]] = {**WORDS_TRAIN, "learning_rate": 8e-3}
_DATA: Final = """  train.json    the SQuAD layout, version 1.1 or 2.0
  train.jsonl   {"context": "Ada built it.", "question": "Who built it?",
                "answer": "Ada", "start": 0} in each line; the start counts
                characters; both are lists if several answers are right,
                and null if the context holds none"""
_RECIPES: Final = (
    Recipe(
        1_500, "bpe", 2_000, 384, (Size(2, 64, 4, 128, 0.3),), _MODEL, _TRAIN, most_epochs=60,
    ),
    Recipe(
        12_000, "bpe", 4_000, 384, (Size(3, 128, 4, 256, 0.2),), _MODEL, _TRAIN, most_epochs=40,
    ),
    Recipe(
        None, "bpe", 8_000, 384, (Size(3, 128, 4, 256, 0.2), Size(3, 192, 4, 512, 0.2, 8_000_000)),
        _MODEL, _TRAIN, most_epochs=30,
    ),
)  # fmt: skip

TASK: Final = Task(
    kind="answer",
    outputs="span",
    families=("encoder", "decoder"),
    new=NewWords(
        "Write a run file that trains a model to find the answers to questions in a text.",
        ("--text train.json --valid-text dev.json",),
        _DATA,
        ("text",),
        ("valid_text",),
        longer="longer contexts are read in windows that overlap",
    ),
    evaluate=EvaluateWords(("text",), "exact match and F1"),
    used_with="answer {run} --question TEXT --context-file FILE",
    recipes=_RECIPES,
    score="F1",
    learns_head=True,
)
