"""Description of the task tag: predict a tag for each word of a text (token classification)."""

from __future__ import annotations

from typing import Final

from clearhead.spec.tasks.base import EvaluateWords, NewWords, Recipe, Size, Task
from clearhead.tasks.recipe_parts import ENCODER, WORDS_TRAIN

_BASELINE: Final = "the most common tag of each word"
_DATA: Final = """  train.conll         one word per line, its tag in the last column; an empty
                      line ends a sentence
  train.jsonl         {"tokens": ["Ada", "sleeps"], "tags": ["B-PER", "O"]}
                      in each line"""
_RECIPES: Final = (
    Recipe(
        1_500, "bpe", 2_000, 256, (Size(2, 64, 4, 128, 0.3),), ENCODER, WORDS_TRAIN, most_epochs=60,
        below=_BASELINE,
    ),
    Recipe(
        12_000, "bpe", 4_000, 256, (Size(2, 128, 4, 256, 0.2), Size(3, 192, 4, 512, 0.2, 4_000_000)),
        ENCODER, WORDS_TRAIN, most_epochs=40,
    ),
    Recipe(
        None, "bpe", 8_000, 256, (Size(2, 128, 4, 256, 0.2), Size(3, 192, 4, 512, 0.2, 4_000_000)),
        ENCODER, WORDS_TRAIN, most_epochs=30,
    ),
)  # fmt: skip

TASK: Final = Task(
    kind="tag",
    outputs="token_labels",
    families=("encoder", "decoder"),
    new=NewWords(
        "Write a run file that trains a tagger of words, for example to find names.",
        ("--text train.conll --valid-text valid.conll",),
        _DATA,
        ("text",),
        ("valid_text",),
        longer="longer sentences are read in several chunks",
    ),
    evaluate=EvaluateWords(("text",), "entity-level F1"),
    used_with="tag {run} FILE",
    recipes=_RECIPES,
    score="entity F1",
    learns_head=True,
)
