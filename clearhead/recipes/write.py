"""The text of a run file: its tables with a comment behind each choice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clearhead.recipes.survey import BATCH_TOKENS, Sizes, Survey, TextSizes, TextSurvey

Value = str | int | float | bool


@dataclass(frozen=True)
class Plan:
    """Where the data of a run file is.

    Attributes:
        train: the table of the training data, as in [data].
        valid: that of the validation data, or the share of the training data from its end.
        note: how the validation data was chosen; empty where it was given.
        summary: what there is to train on, such as "120 pairs (900 words)".
        run: the run directory.
    """

    train: Mapping[str, Value]
    valid: Mapping[str, Value] | float
    note: str
    summary: str
    run: str


@dataclass(frozen=True)
class Key:
    """One line of a run file."""

    name: str
    value: Value | Mapping[str, Value]
    comment: str = ""

    def __str__(self) -> str:
        return f"{self.name} = {_toml(self.value)}" + (f"   # {self.comment}" if self.comment else "")


def _toml(value: Value | Mapping[str, Value]) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + " }"
    # JSON writes text, numbers and booleans as TOML does.
    return json.dumps(value, ensure_ascii=False)


def _run_file(plan: Plan, tables: Mapping[str, Sequence[Key]]) -> str:
    lines = [
        f"# Written by `clearhead new` for {plan.summary}. Train with: clearhead train THIS_FILE",
        "# Relative paths are relative to the folder in which you start the program.",
    ]
    for name, keys in tables.items():
        lines += ["", f"[{name}]", *map(str, keys)]
    return "\n".join(lines) + "\n"


def _data(plan: Plan, max_length: Key, *others: Key) -> list[Key]:
    documents = "document: file | line | paragraph" if "document" in plan.train else ""
    return [Key("train", plan.train, documents), Key("valid", plan.valid, plan.note), max_length, *others]


def translation_file(plan: Plan, data: Survey, sizes: Sizes) -> str:
    """Return a commented run file for translation.

    Args:
        plan: where the data is.
        data: what was counted in it.
        sizes: what fits it.
    """
    unit = "characters" if data.kind == "character" else "words"
    longest = f"999 of 1000 pairs have at most {data.longest} {unit}"
    joint = Key("joint", True, "one vocabulary for both languages, so that they can share one table")
    stop: dict[str, Value] = {"metric": "bleu", "patience": sizes.patience}
    return _run_file(
        plan,
        {
            "task": [Key("kind", "translate")],
            "data": _data(
                plan, Key("max_length", sizes.max_length, f"in tokens; longer pairs are left out. {longest}")
            ),
            "tokenizer": [*_tokenizer(data.kind, sizes.vocab_size, data.num_words), joint],
            "model": [
                Key("family", "encoder-decoder"),
                Key("preset", "transformer", "the original Transformer; the lines below override it"),
                *_sizes(sizes, "in the encoder, and as many in the decoder"),
                Key("feedforward", sizes.feedforward),
                Key("dropout", sizes.dropout, "more where there is little data"),
            ],
            "train": [
                *_length(plan, sizes.epochs),
                Key("batch_tokens", BATCH_TOKENS, "padded tokens in one batch: less if memory is short"),
                Key("optimizer", "adamw", "adam | adamw | muon"),
                Key("learning_rate", 2e-3),
                Key("schedule", "inverse-sqrt", "paper | inverse-sqrt | cosine | linear | wsd | plateau | constant"),
                Key("warmup", sizes.warmup, "steps"),
                Key("label_smoothing", 0.1),
                *_end(sizes.validate_every),
                Key("early_stop", stop, "validations in a row without a better score"),
            ],
        },
    )


@dataclass(frozen=True)
class Kind:
    """What is particular to the run files of one task.

    Attributes:
        family: of the model.
        families: which there are, for the comment.
        task: further keys of [task].
        score: what early stopping looks at.
        longer: what becomes of sequences that are too long.
        batch: what a batch is good for.
    """

    family: str
    families: str
    task: tuple[Key, ...]
    score: str
    longer: str
    batch: str = "padded tokens in one batch: less if memory is short"


LABELS = Key("labels", "single_label", "single_label | multi_label | regression")
KINDS: Mapping[str, Kind] = {
    "generate": Kind(
        "decoder", "decoder | encoder-decoder", (), "loss", "a block; longer documents are cut into blocks"
    ),
    "fill": Kind(
        "encoder",
        "",
        (Key("mask_share", 0.15, "of the tokens"), Key("whole_words", False, "true: all pieces of a word are hidden")),
        "loss",
        "longer documents are cut into pieces",
    ),
    "denoise": Kind(
        "encoder-decoder",
        "",
        (
            Key("noise", "spans", "spans | infill"),
            Key("noise_share", 0.15, "of the tokens"),
            Key("mean_span", 3.0, "tokens in a hidden stretch, on average"),
        ),
        "loss",
        "longer documents are cut into pieces",
    ),
    "classify": Kind(
        "encoder",
        "encoder | decoder | encoder-decoder",
        (LABELS, Key("pool", "mean", "which states stand for the text: first | mean | last")),
        "score",
        "of longer texts the front is read",
    ),
    "tag": Kind("encoder", "encoder | decoder", (), "score", "longer sentences are read in several pieces"),
    "embed": Kind(
        "encoder",
        "encoder | decoder",
        (
            Key("pool", "mean", "which states stand for the text: first | mean | last"),
            Key("temperature", 0.05, "what cosines are divided by: lower minds near misses more"),
        ),
        "score",
        "longer pairs are left out",
        "rows times the longest text: a pair is told from all others of its batch, so more is harder",
    ),
}


def text_file(plan: Plan, kind: str, data: TextSurvey, sizes: TextSizes) -> str:
    """Return a commented run file for a task on running text.

    Args:
        plan: where the text is.
        kind: generate, fill or denoise.
        data: what was counted in it.
        sizes: what fits it.
    """
    own = KINDS[kind]
    packed = [Key("pack", True, "short documents share a block, and do not see each other")]
    return _run_file(
        plan,
        {
            "task": [Key("kind", kind), *own.task],
            "data": _data(
                plan,
                Key("max_length", sizes.max_length, f"in tokens; {own.longer}"),
                *(packed if kind == "generate" else []),
            ),
            "tokenizer": _tokenizer(sizes.tokenizer, sizes.vocab_size, data.num_words),
            "model": _model(own, sizes),
            "train": _train(plan, own, sizes),
        },
    )


def labelled_file(plan: Plan, kind: str, data: Survey, sizes: Sizes, *, labels: str = "single_label") -> str:
    """Return a commented run file for a task on texts with labels, or on pairs that belong together.

    Args:
        plan: where the data is.
        kind: classify, tag or embed.
        data: what was counted in it.
        sizes: what fits it.
        labels: what a label is, for classify.
    """
    own = KINDS[kind]
    unit = "characters" if data.kind == "character" else "words"
    keys = [Key(LABELS.name, labels, LABELS.comment) if key is LABELS else key for key in own.task]
    length = f"in tokens; {own.longer}. 999 of 1000 have at most {data.longest} {unit}"
    return _run_file(
        plan,
        {
            "task": [Key("kind", kind), *keys],
            "data": _data(plan, Key("max_length", sizes.max_length, length)),
            "tokenizer": _tokenizer(data.kind, sizes.vocab_size, data.num_words),
            "model": _model(own, sizes),
            "train": _train(plan, own, sizes),
        },
    )


def _tokenizer(kind: str, vocab_size: int | None, num_words: int) -> list[Key]:
    if kind == "split":
        return [Key("kind", "split", 'the text is segmented already: its "@@ " marks are joined in the output')]
    if kind == "character":
        return [Key("kind", "character", "the text has few characters, or its lines are single words")]
    others = "bpe | byte-bpe | unigram | wordpiece | word | character | byte | split"
    assert vocab_size is not None, "a vocabulary that is learned has a size"
    return [Key("kind", kind, others), Key("vocab_size", vocab_size, f"there are {num_words} distinct words")]


def _sizes(sizes: Sizes | TextSizes, layers: str) -> list[Key]:
    return [
        Key("layers", sizes.layers, layers),
        Key("width", sizes.width),
        Key("heads", sizes.heads, "must divide the width"),
    ]


def _model(own: Kind, sizes: Sizes | TextSizes) -> list[Key]:
    """The forms that the field came to after the original Transformer: norms in front, rotary positions, gates."""
    each = "in each stack" if own.family == "encoder-decoder" else ""
    return [
        Key("family", own.family, own.families),
        *_sizes(sizes, each),
        Key("norm", "rms", "layer | rms"),
        Key("norm_place", "pre", "post | pre"),
        Key("positions", "rotary", "sinusoidal | learned | rotary | alibi | buckets"),
        Key("activation", "silu", "relu | gelu | gelu_tanh | silu"),
        Key("gated", True),
        Key("feedforward", 2 * sizes.width, "each of the three maps of a gated network"),
        Key("dropout", sizes.dropout, "more where there is little data"),
    ]


def _length(plan: Plan, epochs: int) -> list[Key]:
    return [Key("run", plan.run), Key("epochs", epochs, "or steps, or seconds")]


def _end(validate_every: int) -> list[Key]:
    return [
        Key("clip", 1.0),
        Key("seed", 1),
        Key("validate_every", validate_every, "steps"),
        Key("keep", 3, "checkpoints, besides the best one"),
    ]


def _train(plan: Plan, own: Kind, sizes: Sizes | TextSizes) -> list[Key]:
    patience: dict[str, Value] = {"metric": own.score, "patience": 10}
    return [
        *_length(plan, sizes.epochs),
        Key("batch_tokens", BATCH_TOKENS, own.batch),
        Key("optimizer", "adamw", "adam | adamw | muon"),
        Key("learning_rate", 1e-3),
        Key("schedule", "cosine", "paper | inverse-sqrt | cosine | linear | wsd | plateau | constant"),
        Key("warmup", sizes.warmup, "steps"),
        Key("weight_decay", 0.1),
        *_end(sizes.validate_every),
        Key("early_stop", patience, f"validations in a row without a better {own.score}"),
    ]
