"""Description of the task denoise: restore corrupted text, before training for another task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from clearhead.spec.tasks.base import Architecture, EvaluateWords, NewWords, Recipe, Size, Task, Value
from clearhead.tasks.recipe_parts import BUCKETS, EVALUATED_TEXT, LONGER_TEXT, TEXT_OPTIONS, TEXT_TRAIN, TEXTS

_MODEL: Final = Architecture({**BUCKETS, "activation": "silu", "gated": True, "tie": "all"}, saved_as="t5")
_TRAIN: Final[Mapping[str, Value]] = {**TEXT_TRAIN, "learning_rate": 2e-3}
_SETTINGS: Final[Mapping[str, Value]] = {"noise": "spans", "noise_share": 0.15, "mean_span": 3.0}
_RECIPES: Final = (
    Recipe(
        100_000, "bpe", 1_000, 256, (Size(2, 64, 4, 128, 0.3),), _MODEL, _TRAIN, most_epochs=20,
        task=_SETTINGS,
    ),
    Recipe(
        800_000, "bpe", 4_000, 256, (Size(2, 128, 4, 256, 0.3),),
        _MODEL, _TRAIN, most_epochs=12, task=_SETTINGS,
    ),
    Recipe(
        None, "bpe", 8_000, 256, (Size(2, 128, 4, 256, 0.1), Size(3, 192, 4, 512, 0.1, 4_000_000)),
        _MODEL, _TRAIN, most_epochs=30, task=_SETTINGS,
    ),
)  # fmt: skip

TASK: Final = Task(
    kind="denoise",
    outputs="vocabulary",
    families=("encoder-decoder",),
    new=NewWords(
        "Write a run file that trains an encoder-decoder to restore text, before it is trained for another task.",
        ("--text corpus/",),
        TEXTS,
        *TEXT_OPTIONS,
        longer=LONGER_TEXT,
        comments={
            "noise": "spans | infill",
            "noise_share": "share of the tokens in spans",
            "mean_span": "mean number of tokens in a span",
        },
    ),
    evaluate=EvaluateWords(("text",), "loss, perplexity, accuracy", EVALUATED_TEXT),
    # A denoised model is mostly the start for another task.
    used_with="new translate --source FILE --target FILE --init {run}",
    recipes=_RECIPES,
    score="accuracy",
    writes=True,
    # For pairs of texts, such as a text and its summary.
    measured_on_pairs_as="translate",
)
