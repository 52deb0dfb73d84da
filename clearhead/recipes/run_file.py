"""The text of a run file: its tables, with a comment behind each choice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from clearhead.recipes.survey import BATCH_TOKENS, Sizes, Survey, TextSurvey

Value = str | int | float | bool

_SCHEDULES = "paper | inverse-sqrt | cosine | linear | wsd | plateau | constant"
_LONGER_TEXT = "longer documents are cut into windows"
_POOL = ("pool", "mean", "which states represent the text: first | mean | last")


@dataclass(frozen=True)
class DataPlan:
    """Where the data of a run file is.

    Attributes:
        train: the table of the training data, as in [data].
        valid: the table of the validation data, or the share of the training data from its end.
        note: how the validation data was chosen; empty if it was given.
        summary: what there is to train on, such as "120 pairs (900 words)".
        run: the run directory.
    """

    train: Mapping[str, Value]
    valid: Mapping[str, Value] | float
    note: str
    summary: str
    run: str


@dataclass(frozen=True)
class Setting:
    """One line of a run file."""

    name: str
    value: Value | Mapping[str, Value]
    comment: str = ""

    def __str__(self) -> str:
        return f"{self.name} = {_toml(self.value)}" + (f"   # {self.comment}" if self.comment else "")


def _toml(value: Value | Mapping[str, Value]) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + " }"
    # JSON writes text, numbers and booleans as TOML does.
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class TaskDefaults:
    """The defaults of one task.

    Attributes:
        family: of the model.
        families: the values it may have, for the comment.
        longer: what happens to sequences that are too long.
        task: further settings of [task].
        score: the metric of early stopping.
        batch: the comment on the size of a batch.
    """

    family: str
    families: str
    longer: str
    task: tuple[Setting, ...] = ()
    score: str = "score"
    batch: str = "padded tokens in one batch: less if memory is short"


DEFAULTS: Mapping[str, TaskDefaults] = {
    "translate": TaskDefaults("encoder-decoder", "", "longer pairs are left out", score="bleu"),
    "generate": TaskDefaults(
        "decoder", "decoder | encoder-decoder", "a block; longer documents are cut into blocks", score="loss"
    ),
    "fill": TaskDefaults(
        "encoder",
        "",
        _LONGER_TEXT,
        (
            Setting("mask_share", 0.15, "of the tokens"),
            Setting("whole_words", False, "true: all tokens of a word are masked"),
        ),
        score="loss",
    ),
    "denoise": TaskDefaults(
        "encoder-decoder",
        "",
        _LONGER_TEXT,
        (
            Setting("noise", "spans", "spans | infill"),
            Setting("noise_share", 0.15, "of the tokens"),
            Setting("mean_span", 3.0, "tokens in a span, on average"),
        ),
        score="loss",
    ),
    "classify": TaskDefaults(
        "encoder",
        "encoder | decoder | encoder-decoder",
        "longer texts are truncated",
        (Setting("labels", "single_label", "single_label | multi_label | regression"), Setting(*_POOL)),
    ),
    "tag": TaskDefaults("encoder", "encoder | decoder", "longer sentences are read in several chunks"),
    "embed": TaskDefaults(
        "encoder",
        "encoder | decoder",
        "longer pairs are left out",
        (
            Setting(*_POOL),
            Setting("temperature", 0.05, "what cosines are divided by: lower weighs hard negatives more"),
        ),
        batch="rows times the longest text: a pair is compared with all others of its batch, so more is harder",
    ),
}


def run_file_text(
    plan: DataPlan, kind: str, data: Survey | TextSurvey, sizes: Sizes, *, labels: str | None = None
) -> str:
    """Return a commented run file.

    Args:
        plan: where the data is.
        kind: the task.
        data: what was counted in the data.
        sizes: what fits it.
        labels: what a label is, for classify.
    """
    own = DEFAULTS[kind]
    length = f"in tokens; {own.longer}"
    if isinstance(data, Survey):
        what = "pairs have" if kind == "translate" else "have"
        length += f". 999 of 1000 {what} at most {data.longest} {data.unit}"
    tables = {
        "task": [
            Setting("kind", kind),
            *(Setting("labels", labels, key.comment) if labels and key.name == "labels" else key for key in own.task),
        ],
        "data": [
            Setting("train", plan.train, "document: file | line | paragraph" if "document" in plan.train else ""),
            Setting("valid", plan.valid, plan.note),
            Setting("max_length", sizes.max_length, length),
        ],
        "tokenizer": _tokenizer(sizes, data.num_words),
        "model": _model(kind, own, sizes),
        "train": _train(kind, plan, own, sizes),
    }
    if kind == "generate":
        tables["data"].append(Setting("pack", True, "short documents share a block, and do not see each other"))
    if kind == "translate":
        joint = "one vocabulary for both languages, so that they can share one table"
        tables["tokenizer"].append(Setting("joint", True, joint))
    lines = [
        f"# Written by `clearhead new` for {plan.summary}. Train with: clearhead train THIS_FILE",
        "# Relative paths are relative to the folder in which you start the program.",
    ]
    for name, settings in tables.items():
        lines += ["", f"[{name}]", *map(str, settings)]
    return "\n".join(lines) + "\n"


def _tokenizer(sizes: Sizes, num_words: int) -> list[Setting]:
    if sizes.tokenizer == "split":
        return [Setting("kind", "split", 'the text is segmented already: its "@@ " marks are joined in the output')]
    if sizes.tokenizer == "character":
        return [Setting("kind", "character", "the text has few characters, or its lines are single words")]
    others = "bpe | byte-bpe | unigram | wordpiece | word | character | byte | split"
    assert sizes.vocab_size is not None, "a vocabulary that is learned has a size"
    return [
        Setting("kind", sizes.tokenizer, others),
        Setting("vocab_size", sizes.vocab_size, f"there are {num_words} distinct words"),
    ]


def _model(kind: str, own: TaskDefaults, sizes: Sizes) -> list[Setting]:
    """The original Transformer for translation; for other tasks pre-norm, rotary positions and gates."""
    each = "in each stack" if own.family == "encoder-decoder" else ""
    if kind == "translate":
        each = "in the encoder, and as many in the decoder"
    common = [
        Setting("layers", sizes.layers, each),
        Setting("width", sizes.width),
        Setting("heads", sizes.heads, "must divide the width"),
    ]
    dropout = Setting("dropout", sizes.dropout, "more where there is little data")
    family = Setting("family", own.family, own.families)
    if kind == "translate":
        preset = Setting("preset", "transformer", "the original Transformer; the lines below override it")
        return [family, preset, *common, Setting("feedforward", 4 * sizes.width), dropout]
    return [
        family,
        *common,
        Setting("norm", "rms", "layer | rms"),
        Setting("norm_place", "pre", "post | pre"),
        Setting("positions", "rotary", "sinusoidal | learned | rotary | alibi | buckets"),
        Setting("activation", "silu", "relu | gelu | gelu_tanh | silu"),
        Setting("gated", True),
        Setting("feedforward", 2 * sizes.width, "each of the three maps of a gated network"),
        dropout,
    ]


def _train(kind: str, plan: DataPlan, own: TaskDefaults, sizes: Sizes) -> list[Setting]:
    is_translation = kind == "translate"
    patience: dict[str, Value] = {"metric": own.score, "patience": 10}
    regularization = Setting("label_smoothing", 0.1) if is_translation else Setting("weight_decay", 0.1)
    score = "score" if is_translation else own.score
    return [
        Setting("run", plan.run),
        Setting("epochs", sizes.epochs, "or steps, or seconds"),
        Setting("batch_tokens", BATCH_TOKENS, own.batch),
        Setting("optimizer", "adamw", "adam | adamw | muon"),
        Setting("learning_rate", 2e-3 if is_translation else 1e-3),
        Setting("schedule", "inverse-sqrt" if is_translation else "cosine", _SCHEDULES),
        Setting("warmup", sizes.warmup, "steps"),
        regularization,
        Setting("clip", 1.0),
        Setting("seed", 1),
        Setting("validate_every", sizes.validate_every, "steps"),
        Setting("keep", 3, "checkpoints, besides the best one"),
        Setting("early_stop", patience, f"validations in a row without a better {score}"),
    ]
