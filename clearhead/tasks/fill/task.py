"""Description of the task fill: predict the hidden words of a text (masked language modelling)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from clearhead.spec.tasks.base import EvaluateWords, NewWords, Recipe, Size, Task, Value
from clearhead.tasks.recipe_parts import ENCODER, EVALUATED_TEXT, LONGER_TEXT, TEXT_OPTIONS, TEXT_TRAIN, TEXTS

_SETTINGS: Final[Mapping[str, Value]] = {"mask_share": 0.15, "whole_words": False}
_RECIPES: Final = (
    Recipe(100_000, "bpe", 1_000, 256, (Size(2, 64, 4, 128, 0.2),), ENCODER, TEXT_TRAIN, 60, task=_SETTINGS),
    Recipe(
        800_000, "bpe", 4_000, 256, (Size(2, 128, 4, 256, 0.2), Size(4, 192, 4, 512, 0.2, 4_000_000)),
        ENCODER, TEXT_TRAIN, most_epochs=60, task=_SETTINGS,
    ),
    Recipe(
        None, "bpe", 8_000, 256,
        (Size(2, 128, 4, 256, 0.1), Size(4, 192, 4, 512, 0.1, 4_000_000), Size(6, 256, 4, 704, 0.1, 20_000_000)),
        ENCODER, TEXT_TRAIN, most_epochs=30, task=_SETTINGS,
    ),
)  # fmt: skip

TASK: Final = Task(
    kind="fill",
    outputs="vocabulary",
    families=("encoder",),
    new=NewWords(
        "Write a run file that trains an encoder to fill blanks.",
        ("--text captions.txt",),
        TEXTS,
        *TEXT_OPTIONS,
        longer=LONGER_TEXT,
        comments={"mask_share": "share of the tokens", "whole_words": "true masks all tokens of a word"},
    ),
    evaluate=EvaluateWords(("text",), "loss, perplexity, accuracy", EVALUATED_TEXT),
    used_with="fill {run} TEXT",
    recipes=_RECIPES,
    score="accuracy",
)
