"""Description of the task translate: generate the translation of a text token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from clearhead.spec.tasks.base import Architecture, EvaluateWords, NewWords, Recipe, Size, Task, Value
from clearhead.tasks.recipe_parts import BUCKETS, LONGER_PAIRS, MUON, PAIR_OPTIONS, TWO_FILES

_MODEL: Final = Architecture({**BUCKETS, "tie": "all"}, saved_as="t5")
_TRAIN: Final[Mapping[str, Value]] = {
    **MUON, "batch_tokens": 1024, "learning_rate": 8e-3, "label_smoothing": 0.1, "bleu_sentences": 300,
    "metric": "bleu",
}  # fmt: skip
_RECIPES: Final = (
    Recipe(
        1_500, "bpe", 1_000, 256, (Size(2, 64, 4, 256, 0.3),), _MODEL, _TRAIN, most_epochs=120,
    ),
    Recipe(
        12_000, "bpe", 4_000, 256, (Size(2, 128, 4, 512, 0.3), Size(2, 192, 4, 512, 0.3, 1_500_000)),
        _MODEL, _TRAIN, most_epochs=40,
    ),
    Recipe(
        None, "bpe", 8_000, 256,
        (Size(2, 128, 4, 512, 0.1), Size(2, 192, 4, 512, 0.1, 1_500_000), Size(4, 256, 4, 1024, 0.2, 12_000_000)),
        _MODEL, _TRAIN, most_epochs=25,
    ),
)  # fmt: skip

TASK: Final = Task(
    kind="translate",
    outputs="vocabulary",
    families=("encoder-decoder",),
    new=NewWords(
        "Write a run file that trains a translator.",
        ("--source train.de --target train.en",),
        TWO_FILES,
        *PAIR_OPTIONS,
        longer=LONGER_PAIRS,
    ),
    evaluate=EvaluateWords(
        ("source", "target"),
        "BLEU, chrF, loss, perplexity",
        (
            *("tokenize", "lowercase", "beam_size", "length_penalty", "from_language", "to_language"),
            *("output", "batch_size"),
        ),
    ),
    used_with="translate {run} FILE",
    recipes=_RECIPES,
    score="BLEU",
    scores_translations=True,
    writes=True,
    is_paired=True,
    has_two_vocabularies=True,
)
