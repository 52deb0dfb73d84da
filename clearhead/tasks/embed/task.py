"""Description of the task embed: map texts with the same meaning to similar vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from clearhead.spec.tasks.base import EvaluateWords, NewWords, Recipe, Size, Task, Value
from clearhead.tasks.recipe_parts import ENCODER, LONGER_PAIRS, MUON, PAIR_OPTIONS, POOL, TWO_FILES

_TRAIN: Final[Mapping[str, Value]] = {
    **MUON, "batch_tokens": 4096, "learning_rate": 4e-3, "weight_decay": 0.1, "metric": "score",
}  # fmt: skip
_SETTINGS: Final[Mapping[str, Value]] = {"pool": "mean", "temperature": 0.05}
_BASELINE: Final = "retrieval by shared words, translated word by word"
_RECIPES: Final = (
    Recipe(
        1_500, "bpe", 1_000, 256, (Size(2, 64, 4, 128, 0.2),), ENCODER, _TRAIN, most_epochs=60,
        task=_SETTINGS, below=_BASELINE,
    ),
    Recipe(
        12_000, "bpe", 4_000, 256, (Size(1, 128, 4, 256, 0.2), Size(1, 256, 4, 512, 0.3, 1_500_000)),
        ENCODER, _TRAIN, most_epochs=60, task=_SETTINGS,
    ),
    Recipe(
        None, "bpe", 8_000, 256, (Size(1, 128, 4, 256, 0.1), Size(2, 256, 4, 512, 0.1, 4_000_000)),
        ENCODER, _TRAIN, most_epochs=30, task=_SETTINGS,
    ),
)  # fmt: skip

TASK: Final = Task(
    kind="embed",
    outputs="vector",
    families=("encoder", "decoder"),
    new=NewWords(
        "Write a run file that trains an encoder to map texts with the same meaning to similar vectors.",
        ("--source train.de --target train.en",),
        TWO_FILES,
        *PAIR_OPTIONS,
        longer=LONGER_PAIRS,
        batch="rows times the longest text; a larger batch is harder, since a pair is compared with all others",
        comments={**POOL, "temperature": "divides the cosines; a lower value weighs hard negatives more"},
    ),
    evaluate=EvaluateWords(
        ("source", "target"), "recall@1; with --labels F: Spearman", ("labels", "similarities", "batch_size")
    ),
    used_with="embed {run} FILE",
    recipes=_RECIPES,
    score="recall@1",
    smooths_labels=False,
    is_paired=True,
)
