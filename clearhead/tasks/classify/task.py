"""Description of the task classify: predict one label, several labels or a number for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from clearhead.spec.tasks.base import EvaluateWords, NewWords, Recipe, Size, Task, Value
from clearhead.tasks.recipe_parts import DATASETS, ENCODER, MUON, POOL

_TRAIN: Final[Mapping[str, Value]] = {
    **MUON, "batch_tokens": 2048, "learning_rate": 3e-3, "weight_decay": 0.1, "label_smoothing": 0.1,
    "metric": "score",
}  # fmt: skip
_SETTINGS: Final[Mapping[str, Value]] = {"pool": "mean"}
_BASELINE: Final = "naive Bayes over words and pairs of words"
_DATA: Final = f"""  reviews.tsv, .csv   a table; name its columns as in its first line, or by
                      number, counted from 1
  reviews.jsonl       {{"text": "A fine film.", "label": "good"}} in each line
  reviews.txt         a text in each line, with --labels F line by line
{DATASETS}
  Labels are names. Labels that are numbers with decimals train a regression.
  In JSON lines, a list holds several labels of one text."""
_RECIPES: Final = (
    Recipe(
        1_500, "bpe", 1_000, 512, (Size(2, 64, 4, 128, 0.4),), ENCODER, _TRAIN, most_epochs=20,
        task=_SETTINGS, below=_BASELINE,
    ),
    Recipe(
        12_000, "bpe", 8_000, 512, (Size(1, 256, 4, 512, 0.7),), ENCODER, _TRAIN, most_epochs=3,
        task=_SETTINGS, below=_BASELINE,
    ),
    Recipe(
        None, "bpe", 8_000, 512, (Size(2, 128, 4, 256, 0.2), Size(3, 192, 4, 512, 0.2, 8_000_000)),
        ENCODER, _TRAIN, most_epochs=8, task=_SETTINGS,
    ),
)  # fmt: skip

TASK: Final = Task(
    kind="classify",
    outputs="labels",
    families=("encoder", "decoder", "encoder-decoder"),
    new=NewWords(
        "Write a run file that trains a classifier of texts or of pairs of texts.",
        ("--text reviews.tsv --labels label", "--text reviews.txt --labels labels.txt"),
        _DATA,
        ("text", "labels"),
        ("label_kind", "text_column", "pair", "valid_text", "valid_labels"),
        longer="longer texts are truncated",
        comments={"labels": "single_label | multi_label | regression", **POOL},
    ),
    evaluate=EvaluateWords(
        ("text", "labels"), "accuracy and macro F1, or Spearman", ("text_column", "pair", "plot", "batch_size")
    ),
    used_with="classify {run} FILE",
    recipes=_RECIPES,
    options={"label_kind": "single_label, multi_label or regression; by default chosen by the labels."},
    learns_head=True,
)
