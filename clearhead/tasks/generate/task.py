"""Description of the task generate: continue a text token by token (language modelling)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from clearhead.spec.tasks.base import Architecture, EvaluateWords, NewWords, Recipe, Size, Task, Value
from clearhead.tasks.recipe_parts import EVALUATED_TEXT, GATED, MUON, TEXT_OPTIONS, TEXTS

_MODEL: Final = Architecture({**GATED, "qk_norm": True, "bias": False}, saved_as="qwen3")
_TRAIN: Final[Mapping[str, Value]] = {
    **MUON, "batch_tokens": 1024, "learning_rate": 8e-3, "weight_decay": 0.1, "metric": "loss",
}  # fmt: skip
_RECIPES: Final = (
    Recipe(200_000, "character", 1_000, 64, (Size(3, 96, 4, 256, 0.2),), _MODEL, _TRAIN, 30),
    Recipe(
        5_000_000, "byte-bpe", 1_500, 128,
        (Size(4, 128, 4, 320, 0.1), Size(4, 192, 4, 512, 0.1, 1_200_000), Size(6, 256, 4, 704, 0.1, 8_000_000)),
        _MODEL, _TRAIN, most_epochs=12,
    ),
    Recipe(
        None, "byte-bpe", 8_000, 256, (Size(4, 192, 4, 512, 0.0), Size(6, 256, 4, 704, 0.0, 8_000_000)),
        _MODEL, _TRAIN, most_epochs=6,
    ),
)  # fmt: skip

TASK: Final = Task(
    kind="generate",
    outputs="vocabulary",
    families=("decoder", "encoder-decoder"),
    new=NewWords(
        "Write a run file that trains a decoder to continue text.",
        ("--text corpus/", "--text stories.txt --document paragraph"),
        TEXTS,
        *TEXT_OPTIONS,
        longer="the length of a block; longer documents are cut into blocks",
    ),
    evaluate=EvaluateWords(("text",), "loss, perplexity, bits per byte", ("window", "stride", *EVALUATED_TEXT)),
    used_with="generate {run} --prompt TEXT",
    recipes=_RECIPES,
    writes=True,
    continues=True,
)
