"""The text of a run file: its tables, with a comment behind each choice."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from clearhead.apps.recipes.survey import Survey, TextSurvey, tokenizer_kind, vocab_size
from clearhead.data.task_tables import data_of
from clearhead.spec.tasks.base import Recipe, Size, Task, Value
from clearhead.spec.tasks.registry import find_task

# The best validation counts; training ends when this many in a row have not improved.
PATIENCE = 5
VALIDATIONS = 10
# What helps where a model from scratch stays below its baseline; small enough for a laptop.
CHECKPOINT = "sentence-transformers/all-MiniLM-L6-v2"
_PLANNED = "which these steps should take; a run that takes much less says how to make it longer"


@dataclass(frozen=True)
class DataPlan:
    """The data of a run, and what is known of it.

    Attributes:
        task: kind of task.
        train: the table of the training data, as in [data].
        valid: the table of the validation data, or the share of the training data from its end.
        note: how the validation data was chosen; empty if it was given.
        summary: what there is to train on, such as "120 pairs (900 words)".
        run: the run directory.
        amount: texts, pairs or sentences, or characters of running text.
        survey: what was counted in it.
        settings: keys of [task] that follow from the data.
        unfit: keys of [train], and of the recipe, that do not suit the data.
        command: that this run file is written by.
    """

    task: str
    train: Mapping[str, Value]
    valid: Mapping[str, Value] | float
    note: str
    summary: str
    run: str
    amount: int
    survey: Survey | TextSurvey
    settings: Mapping[str, Value] = field(default_factory=dict)
    unfit: Collection[str] = ()
    command: str = ""


@dataclass(frozen=True)
class StartCheckpoint:
    """The checkpoint that a run starts from.

    Attributes:
        reference: to it.
        rank: of the low-rank matrices that are trained; None: all weights are trained.
        why: only low-rank matrices are trained.
        saved_as: the Hugging Face architecture in which the trained model is saved; empty: there is none.
    """

    reference: str
    rank: int | None
    why: str
    saved_as: str


@dataclass(frozen=True)
class RunFileChoice:
    """What fits the data and this machine.

    Attributes:
        size: of the model; None: that of a checkpoint.
        max_length: tokens of a text or a block.
        length_note: how it was found.
        steps: of the training.
        steps_note: how they were found.
        validations: how many of them happen in that time.
        minutes: which the steps should fill; None: no such time decides how many there are.
        start: the checkpoint; None: from scratch.
    """

    size: Size | None
    max_length: int
    length_note: str = ""
    steps: int = 1_000
    steps_note: str = ""
    validations: int = VALIDATIONS
    minutes: float | None = None
    start: StartCheckpoint | None = None


@dataclass(frozen=True)
class KeyLine:
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


# Comments on the keys that recipes have, in the order in which they stand in a run file.
_MODEL: Mapping[str, str] = {
    "norm": "layer | rms",
    "norm_place": "before or behind the branches: pre | post",
    "positions": "sinusoidal | learned | rotary | alibi | buckets",
    "activation": "relu | gelu | gelu_tanh | silu",
    "gated": "true: the feed-forward network has a gate, a third matrix",
    "qk_norm": "true: queries and keys are normed",
    "bias": "true: linear maps have a bias",
    "tie": "one table for all embeddings and the output: all | decoder | none",
}
_TRAIN: Mapping[str, str] = {
    "optimizer": "adam | adamw | muon",
    "learning_rate": "the peak; lower it if the loss jumps",
    "weight_decay": "of matrices",
    "schedule": "paper | inverse-sqrt | cosine | linear | wsd | plateau | constant",
    "warmup": "a share of the steps, or a number of them",
    "label_smoothing": "the share of each label that goes to all others",
    "clip": "the largest norm of a gradient",
    "ema": "an average of the weights is validated and saved; closer to 1 is slower",
    "average": "the last validated weights are averaged at the end, as RUN@averaged",
    "bleu_sentences": "validation pairs that are translated for BLEU",
}


def run_file_text(plan: DataPlan, recipe: Recipe, choice: RunFileChoice) -> str:
    """Return a commented run file.

    Args:
        plan: the data.
        recipe: the values for this task and amount of data.
        choice: what fits data and machine.
    """
    task, recipe = find_task(plan.task), _without(recipe, plan.unfit)
    tables = {
        "task": [
            KeyLine("kind", plan.task),
            *_init(choice),
            *_commented_lines(_task_keys(plan, recipe), task.new.comments),
        ],
        "data": _data(plan, task, choice),
        "tokenizer": _tokenizer(plan, task, recipe, choice) if choice.start is None else [],
        "model": [] if choice.size is None else _model(recipe, task, choice.size),
        "lora": _lora(choice),
        "train": _train(plan, recipe, task, choice),
    }
    lines = [
        f"# Written by `clearhead new` for {plan.summary}. Train with: clearhead train THIS_FILE",
        "# Relative paths are relative to the folder in which you start the program.",
        f"# {_export_note(recipe.model.saved_as if choice.start is None else choice.start.saved_as)}",
        *_advice(plan, recipe),
    ]
    for name, settings in tables.items():
        lines += ["", f"[{name}]", *map(str, settings)] if settings else []
    return "\n".join(lines) + "\n"


def _without(recipe: Recipe, unfit: Collection[str]) -> Recipe:
    """Return a recipe without the keys that do not suit the data."""
    train = {key: value for key, value in recipe.train.items() if key not in unfit}
    return replace(recipe, train=train, below="" if "below" in unfit else recipe.below)


def _advice(plan: DataPlan, recipe: Recipe) -> list[str]:
    """Say what helps where a plain baseline is better."""
    if not recipe.below:
        return []
    return [
        f"# A Transformer from scratch usually stays below {recipe.below} on so little data. What helps: more data,",
        "# or a checkpoint to start from, in the language of your text, such as this English one:",
        f"#   {plan.command} --init {CHECKPOINT}",
    ]


def _init(choice: RunFileChoice) -> list[KeyLine]:
    if choice.start is None:
        return []
    return [KeyLine("init", choice.start.reference, "the checkpoint to start from, with its own model and tokenizer")]


def _lora(choice: RunFileChoice) -> list[KeyLine]:
    if choice.start is None or choice.start.rank is None:
        return []
    comment = f"of matrices that are added to the attention and trained alone, because {choice.start.why}"
    return [KeyLine("rank", choice.start.rank, comment)]


def _export_note(saved_as: str) -> str:
    if saved_as:
        return f"`clearhead convert --to hf` saves the trained model as {saved_as}."
    return "No Hugging Face architecture can express this model: `clearhead convert --to hf` refuses it."


def _commented_lines(values: Mapping[str, Value], comments: Mapping[str, str]) -> list[KeyLine]:
    """Return the keys in the order of their comments, those without one behind them."""
    keys = [*(key for key in comments if key in values), *(key for key in values if key not in comments)]
    return [KeyLine(key, values[key], comments.get(key, "")) for key in keys]


def _task_keys(plan: DataPlan, recipe: Recipe) -> Mapping[str, Value]:
    return {**plan.settings, **recipe.task}


def _data(plan: DataPlan, task: Task, choice: RunFileChoice) -> list[KeyLine]:
    length = f"in tokens; {task.new.longer}" + (f". {choice.length_note}" if choice.length_note else "")
    settings = [
        KeyLine("train", plan.train, "document: file | line | paragraph" if "document" in plan.train else ""),
        KeyLine("valid", plan.valid, plan.note),
        KeyLine("max_length", choice.max_length, length),
    ]
    if "pack" in data_of(plan.task).data.model_fields:
        settings.append(KeyLine("pack", True, "short documents share a block, and do not see each other"))
    return settings


def _tokenizer(plan: DataPlan, task: Task, recipe: Recipe, choice: RunFileChoice) -> list[KeyLine]:
    kind = tokenizer_kind(recipe, plan.survey)
    size = vocab_size(recipe, plan.survey, num_special=data_of(plan.task).num_signs(choice.max_length))
    if kind == "split":
        comment = 'the text is segmented already: its "@@ " marks are joined in the output'
    elif kind == "character":
        comment = "every character is a token, because there are few of them"
    else:
        comment = "bpe | byte-bpe | unigram | wordpiece | word | character | byte | split"
    settings = [KeyLine("kind", kind, comment)]
    if size is not None:
        settings.append(KeyLine("vocab_size", size, f"there are {plan.survey.num_words} distinct words"))
    if task.has_two_vocabularies:
        settings.append(KeyLine("joint", True, "one vocabulary for both languages, so that they can share one table"))
    return settings


def _model(recipe: Recipe, task: Task, size: Size) -> list[KeyLine]:
    family, *others = task.families
    hidden = (
        "each of the three matrices of a gated network"
        if recipe.model.keys.get("gated")
        else "width of the inner layer"
    )
    return [
        KeyLine("family", family, " | ".join(others and (family, *others))),
        KeyLine("layers", size.layers, "in each stack" if family == "encoder-decoder" else ""),
        KeyLine("width", size.width),
        KeyLine("heads", size.heads, "must divide the width"),
        KeyLine("feedforward", size.feedforward, hidden),
        *_commented_lines(recipe.model.keys, _MODEL),
        KeyLine("dropout", size.dropout, "more where there is little data"),
    ]


def _train(plan: DataPlan, recipe: Recipe, task: Task, choice: RunFileChoice) -> list[KeyLine]:
    values = dict(recipe.train)
    metric, batch_tokens = values.pop("metric"), values.pop("batch_tokens")
    every = max(1, -(-choice.steps // choice.validations))
    best: dict[str, Value] = {"metric": metric, "patience": PATIENCE}
    stop = f"the best {metric} is kept; training ends after {PATIENCE} validations in a row without a better one"
    return [
        KeyLine("run", plan.run, "the run directory"),
        KeyLine("steps", choice.steps, choice.steps_note),
        *([] if choice.minutes is None else [KeyLine("planned_minutes", choice.minutes, _PLANNED)]),
        KeyLine("batch_tokens", batch_tokens, task.new.batch),
        *_commented_lines(values, _TRAIN),
        KeyLine("precision", "auto", "auto | fp32 | bf16"),
        KeyLine("device", "auto", "auto | cpu | cuda | mps"),
        KeyLine("seed", 1, "of weights, order and dropout"),
        KeyLine("validate_every", every, "steps; a validation also saves a checkpoint"),
        KeyLine("keep", 3, "checkpoints, besides the best one"),
        KeyLine("snapshots", 10, "steps whose weights are kept for `view --checkpoints`, spaced like a logarithm"),
        KeyLine("snapshot_megabytes", 1000, "what these take at most: a large model has fewer"),
        KeyLine("early_stop", best, stop),
    ]
