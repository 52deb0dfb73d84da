"""The recipes of `clearhead new`: for each task and amount of data, the values that were best on validation data.

A row is chosen by the amount of data, and the size of its model by the speed of the machine: the last one that reads
at least `least_tokens` in the time that the user has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Value = str | int | float | bool


@dataclass(frozen=True)
class Size:
    """One size of a model, and when it is worth its time.

    Args:
        layers, width, heads, feedforward: as in [model].
        dropout: as in [model].
        least_tokens: the fewest tokens, repetitions included, that it must read to be better than the size before it.
    """

    layers: int
    width: int
    heads: int
    feedforward: int
    dropout: float
    least_tokens: int = 0


@dataclass(frozen=True)
class Architecture:
    """The parts of a model that do not depend on its size.

    Args:
        keys: of [model].
        saved_as: the Hugging Face architecture in which `clearhead convert --to hf` saves it; empty: none fits.
    """

    keys: Mapping[str, Value]
    saved_as: str = ""


@dataclass(frozen=True)
class Recipe:
    """The values of a run file for one task and amount of data.

    Args:
        up_to: the most texts, pairs or sentences, or characters of running text, of this row; None: any number.
        tokenizer: kind of tokenizer. For "character", text with many different characters takes byte-bpe instead.
        vocab_size: the largest vocabulary. It is smaller where fewer words are frequent.
        least_count: a word counts as frequent if it occurs this often.
        max_length: for running text whose documents are not lines, the length of a block in tokens; for all other
            data, the most tokens of a text: the longest text decides.
        sizes: of the model, the smallest first.
        model: the rest of [model].
        train: the keys of [train] other than its length and its run directory.
        most_epochs: the passes over the data after which more of them do harm or no good.
        task: keys of [task] beside its kind.
        below: the plain baseline that a model from scratch stays below on so much data; empty: none.
    """

    up_to: int | None
    tokenizer: str
    vocab_size: int
    max_length: int
    sizes: tuple[Size, ...]
    model: Architecture
    train: Mapping[str, Value]
    most_epochs: int
    least_count: int = 2
    task: Mapping[str, Value] = field(default_factory=dict)
    below: str = ""


# The best validation counts; training ends when this many in a row have not improved.
PATIENCE = 5
VALIDATIONS = 10

_MODERN: Mapping[str, Value] = {"norm": "rms", "norm_place": "pre", "positions": "rotary"}
_GATED: Mapping[str, Value] = {**_MODERN, "activation": "silu", "gated": True}
_MUON: Mapping[str, Value] = {"optimizer": "muon", "schedule": "cosine", "warmup": 0.1, "clip": 1.0}

# The positions of T5: as good as rotary ones here, and an architecture that others read.
_BUCKETS: Mapping[str, Value] = {"norm": "rms", "norm_place": "pre", "positions": "buckets", "bias": False}
_TRANSLATE = Architecture({**_BUCKETS, "tie": "all"}, saved_as="t5")
_TRANSLATE_TRAIN: Mapping[str, Value] = {
    **_MUON, "batch_tokens": 1024, "learning_rate": 8e-3, "label_smoothing": 0.1, "bleu_sentences": 300,
    "metric": "bleu",
}  # fmt: skip
_GENERATE = Architecture({**_GATED, "qk_norm": True, "bias": False}, saved_as="qwen3")
_GENERATE_TRAIN: Mapping[str, Value] = {
    **_MUON, "batch_tokens": 1024, "learning_rate": 8e-3, "weight_decay": 0.1, "metric": "loss",
}  # fmt: skip
_ENCODER = Architecture(_GATED, saved_as="eurobert")
# The same layers, and a class that finds answers.
_READER = Architecture(_GATED, saved_as="ultrabert")
_FILL_TRAIN: Mapping[str, Value] = {
    **_MUON, "batch_tokens": 2048, "learning_rate": 5e-3, "weight_decay": 0.1, "metric": "loss",
}  # fmt: skip
_FILL: Mapping[str, Value] = {"mask_share": 0.15, "whole_words": False}
_TWO_STACKS = Architecture({**_BUCKETS, "activation": "silu", "gated": True, "tie": "all"}, saved_as="t5")
_DENOISE_TRAIN: Mapping[str, Value] = {**_FILL_TRAIN, "learning_rate": 2e-3}
_DENOISE: Mapping[str, Value] = {"noise": "spans", "noise_share": 0.15, "mean_span": 3.0}
_CLASSIFY: Mapping[str, Value] = {"pool": "mean"}
_CLASSIFY_TRAIN: Mapping[str, Value] = {
    **_MUON, "batch_tokens": 2048, "learning_rate": 3e-3, "weight_decay": 0.1, "label_smoothing": 0.1,
    "metric": "score",
}  # fmt: skip
_TAG_TRAIN: Mapping[str, Value] = {
    **_MUON, "batch_tokens": 1024, "learning_rate": 4e-3, "weight_decay": 0.1, "metric": "score",
}  # fmt: skip
_ANSWER_TRAIN: Mapping[str, Value] = {**_TAG_TRAIN, "learning_rate": 8e-3}
_EMBED: Mapping[str, Value] = {"pool": "mean", "temperature": 0.05}
_EMBED_TRAIN: Mapping[str, Value] = {
    **_MUON, "batch_tokens": 4096, "learning_rate": 4e-3, "weight_decay": 0.1, "metric": "score",
}  # fmt: skip

_NAIVE_BAYES = "naive Bayes over words and pairs of words"
_TF_IDF = "retrieval by the words that texts share, translated one by one"
_COMMONEST = "the commonest tag of each word"

RECIPES: Mapping[str, tuple[Recipe, ...]] = {
    "translate": (
        Recipe(
            1_500, "bpe", 1_000, 256, (Size(2, 64, 4, 256, 0.3),), _TRANSLATE, _TRANSLATE_TRAIN, most_epochs=120,
        ),
        Recipe(
            12_000, "bpe", 4_000, 256, (Size(2, 128, 4, 512, 0.3), Size(2, 192, 4, 512, 0.3, 1_500_000)),
            _TRANSLATE, _TRANSLATE_TRAIN, most_epochs=40,
        ),
        Recipe(
            None, "bpe", 8_000, 256,
            (Size(2, 128, 4, 512, 0.1), Size(2, 192, 4, 512, 0.1, 1_500_000), Size(4, 256, 4, 1024, 0.2, 12_000_000)),
            _TRANSLATE, _TRANSLATE_TRAIN, most_epochs=25,
        ),
    ),
    "generate": (
        Recipe(200_000, "character", 1_000, 64, (Size(3, 96, 4, 256, 0.2),), _GENERATE, _GENERATE_TRAIN, 30),
        Recipe(
            5_000_000, "byte-bpe", 1_500, 128,
            (Size(4, 128, 4, 320, 0.1), Size(4, 192, 4, 512, 0.1, 1_200_000), Size(6, 256, 4, 704, 0.1, 8_000_000)),
            _GENERATE, _GENERATE_TRAIN, most_epochs=12,
        ),
        Recipe(
            None, "byte-bpe", 8_000, 256, (Size(4, 192, 4, 512, 0.0), Size(6, 256, 4, 704, 0.0, 8_000_000)),
            _GENERATE, _GENERATE_TRAIN, most_epochs=6,
        ),
    ),
    "fill": (
        Recipe(100_000, "bpe", 1_000, 256, (Size(2, 64, 4, 128, 0.2),), _ENCODER, _FILL_TRAIN, 60, task=_FILL),
        Recipe(
            800_000, "bpe", 4_000, 256, (Size(2, 128, 4, 256, 0.2), Size(4, 192, 4, 512, 0.2, 4_000_000)),
            _ENCODER, _FILL_TRAIN, most_epochs=60, task=_FILL,
        ),
        Recipe(
            None, "bpe", 8_000, 256,
            (Size(2, 128, 4, 256, 0.1), Size(4, 192, 4, 512, 0.1, 4_000_000), Size(6, 256, 4, 704, 0.1, 20_000_000)),
            _ENCODER, _FILL_TRAIN, most_epochs=30, task=_FILL,
        ),
    ),
    "denoise": (
        Recipe(
            100_000, "bpe", 1_000, 256, (Size(2, 64, 4, 128, 0.3),), _TWO_STACKS, _DENOISE_TRAIN, most_epochs=20,
            task=_DENOISE,
        ),
        Recipe(
            800_000, "bpe", 4_000, 256, (Size(2, 128, 4, 256, 0.3),),
            _TWO_STACKS, _DENOISE_TRAIN, most_epochs=12, task=_DENOISE,
        ),
        Recipe(
            None, "bpe", 8_000, 256, (Size(2, 128, 4, 256, 0.1), Size(3, 192, 4, 512, 0.1, 4_000_000)),
            _TWO_STACKS, _DENOISE_TRAIN, most_epochs=30, task=_DENOISE,
        ),
    ),
    "classify": (
        Recipe(
            1_500, "bpe", 1_000, 512, (Size(2, 64, 4, 128, 0.4),), _ENCODER, _CLASSIFY_TRAIN, most_epochs=20,
            task=_CLASSIFY, below=_NAIVE_BAYES,
        ),
        Recipe(
            12_000, "bpe", 8_000, 512, (Size(1, 256, 4, 512, 0.7),), _ENCODER, _CLASSIFY_TRAIN, most_epochs=3,
            task=_CLASSIFY, below=_NAIVE_BAYES,
        ),
        Recipe(
            None, "bpe", 8_000, 512, (Size(2, 128, 4, 256, 0.2), Size(3, 192, 4, 512, 0.2, 8_000_000)),
            _ENCODER, _CLASSIFY_TRAIN, most_epochs=8, task=_CLASSIFY,
        ),
    ),
    "tag": (
        Recipe(
            1_500, "bpe", 2_000, 256, (Size(2, 64, 4, 128, 0.3),), _ENCODER, _TAG_TRAIN, most_epochs=60,
            below=_COMMONEST,
        ),
        Recipe(
            12_000, "bpe", 4_000, 256, (Size(2, 128, 4, 256, 0.2), Size(3, 192, 4, 512, 0.2, 4_000_000)),
            _ENCODER, _TAG_TRAIN, most_epochs=40,
        ),
        Recipe(
            None, "bpe", 8_000, 256, (Size(2, 128, 4, 256, 0.2), Size(3, 192, 4, 512, 0.2, 4_000_000)),
            _ENCODER, _TAG_TRAIN, most_epochs=30,
        ),
    ),
    "answer": (
        Recipe(
            1_500, "bpe", 2_000, 384, (Size(2, 64, 4, 128, 0.3),), _READER, _ANSWER_TRAIN, most_epochs=60,
        ),
        Recipe(
            12_000, "bpe", 4_000, 384, (Size(3, 128, 4, 256, 0.2),), _READER, _ANSWER_TRAIN, most_epochs=40,
        ),
        Recipe(
            None, "bpe", 8_000, 384, (Size(3, 128, 4, 256, 0.2), Size(3, 192, 4, 512, 0.2, 8_000_000)),
            _READER, _ANSWER_TRAIN, most_epochs=30,
        ),
    ),
    "embed": (
        Recipe(
            1_500, "bpe", 1_000, 256, (Size(2, 64, 4, 128, 0.2),), _ENCODER, _EMBED_TRAIN, most_epochs=60,
            task=_EMBED, below=_TF_IDF,
        ),
        Recipe(
            12_000, "bpe", 4_000, 256, (Size(1, 128, 4, 256, 0.2), Size(1, 256, 4, 512, 0.3, 1_500_000)),
            _ENCODER, _EMBED_TRAIN, most_epochs=60, task=_EMBED,
        ),
        Recipe(
            None, "bpe", 8_000, 256, (Size(1, 128, 4, 256, 0.1), Size(2, 256, 4, 512, 0.1, 4_000_000)),
            _ENCODER, _EMBED_TRAIN, most_epochs=30, task=_EMBED,
        ),
    ),
}  # fmt: skip


# --- starting from a checkpoint ---

LORA_RANK = 8
LORA_RATE = 2e-4
# Up to how many parameters; the learning rate of all of them.
_RATES: tuple[tuple[int | None, float], ...] = (
    (5_000_000, 5e-4),
    (60_000_000, 5e-5),
    (200_000_000, 3e-5),
    (None, 2e-5),
)
# For up to how many texts, pairs or sentences, or characters; the most passes over them.
_PASSES: tuple[tuple[int | None, int], ...] = ((1_500, 10), (100_000, 4), (None, 3))
# What helps where a model from scratch stays below its baseline; small enough for a laptop.
CHECKPOINT = "sentence-transformers/all-MiniLM-L6-v2"


def start_recipe(task: str, amount: int, *, num_parameters: int, max_length: int, is_low_rank: bool) -> Recipe:
    """Return the values for starting from a checkpoint, with the model and the tokenizer that it has.

    Args:
        task: kind of task.
        amount: texts, pairs or sentences, or characters of running text.
        num_parameters: of the checkpoint.
        max_length: as in a recipe, within the positions of the checkpoint.
        is_low_rank: whether only low-rank matrices are trained (LoRA).
    """
    scratch = recipe_for(task, amount)
    rate = next(rate for most, rate in _RATES if most is None or num_parameters <= most)
    kept = {key: scratch.train[key] for key in ("metric", "bleu_sentences", "batch_tokens") if key in scratch.train}
    train = {
        **kept, "optimizer": "adamw", "learning_rate": LORA_RATE if is_low_rank else rate, "weight_decay": 0.01,
        "schedule": "linear", "warmup": 0.06, "clip": 1.0,
    }  # fmt: skip
    return Recipe(
        None, "", 0, max_length, (), Architecture({}), train,
        most_epochs=next(passes for most, passes in _PASSES if most is None or amount <= most),
        # The pooling is the checkpoint's.
        task={key: value for key, value in scratch.task.items() if key != "pool"},
    )  # fmt: skip


def recipe_for(task: str, amount: int) -> Recipe:
    """Return the row of a task.

    Args:
        task: kind of task.
        amount: texts, pairs or sentences, or characters of running text.
    """
    return next(row for row in RECIPES[task] if row.up_to is None or amount <= row.up_to)
