"""Write the text of a run file: its tables, with a comment on each choice."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from clearhead.apps.recipes.survey import Survey, TextSurvey, tokenizer_kind, vocab_size
from clearhead.data.task_tables import data_of
from clearhead.spec.tasks.base import Recipe, Size, Task, Value
from clearhead.spec.tasks.registry import find_task

# Training ends after this number of validations in a row without a better one.
PATIENCE = 5
VALIDATIONS = 10
# The checkpoint to recommend if a model from scratch stays below its baseline; it fits on a laptop.
CHECKPOINT = "sentence-transformers/all-MiniLM-L6-v2"
_PLANNED = "minutes that these steps should take; a much shorter run prints how to extend it"


@dataclass(frozen=True)
class DataPlan:
    """The data of a run, with its survey.

    Attributes:
        task: the kind of the task.
        train: the table of the training data in [data].
        valid: the table of the validation data, or the share of the training data at its end.
        note: a comment on the choice of the validation data; empty if it was given.
        summary: a summary of the training data, such as "120 pairs (900 words)".
        run: the run directory.
        amount: the number of texts, pairs or sentences, or of characters of running text.
        survey: the survey of the training data.
        settings: keys of [task] that follow from the data, with their values.
        unfit: keys of [train] and of the recipe that do not suit the data.
        command: the command line that writes this run file.
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
        reference: the reference of the checkpoint.
        rank: the rank of the trained low-rank matrices. None means that all weights are trained.
        why: the reason for training only low-rank matrices.
        saved_as: the Hugging Face architecture for saving the trained model; empty if there is none.
    """

    reference: str
    rank: int | None
    why: str
    saved_as: str


@dataclass(frozen=True)
class RunFileChoice:
    """The values of a run file that fit the data and this machine.

    Attributes:
        size: the size of the model. None means the size of the checkpoint.
        max_length: the maximum number of tokens of a text or block.
        length_note: a comment on the choice of `max_length`.
        steps: the number of training steps.
        steps_note: a comment on the choice of the steps.
        validations: the number of validations during training.
        minutes: the minutes that the steps should take. None means that the time does not limit the steps.
        start: the checkpoint to start from. None means from scratch.
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
    # Texts, numbers and booleans look the same in JSON and TOML.
    return json.dumps(value, ensure_ascii=False)


# Comments on the keys of recipes, in the order of a run file.
_MODEL: Mapping[str, str] = {
    "norm": "layer | rms",
    "norm_place": "before or after the branches: pre | post",
    "positions": "sinusoidal | learned | rotary | alibi | buckets",
    "activation": "relu | gelu | gelu_tanh | silu",
    "gated": "true: the feed-forward network has a gate, a third matrix",
    "qk_norm": "true: queries and keys are normalized",
    "bias": "true: linear maps have a bias",
    "tie": "one table for all embeddings and the output: all | decoder | none",
}
_TRAIN: Mapping[str, str] = {
    "optimizer": "adam | adamw | muon",
    "learning_rate": "the peak; lower it if the loss jumps",
    "weight_decay": "applied to matrices",
    "schedule": "paper | inverse-sqrt | cosine | linear | wsd | plateau | constant",
    "warmup": "a share of the steps, or a number of steps",
    "label_smoothing": "the share of each label that goes to all others",
    "clip": "the largest norm of the gradient",
    "ema": "decay of the weight average that is validated and saved; closer to 1 is slower",
    "average": "the last validated weights are averaged at the end, as RUN@averaged",
    "bleu_sentences": "validation pairs that are translated for BLEU",
}


def run_file_text(plan: DataPlan, recipe: Recipe, choice: RunFileChoice) -> str:
    """Return a commented run file.

    Args:
        plan: the data of the run.
        recipe: the recipe for the task and the amount of data.
        choice: the values that fit the data and this machine.
    """
    task, recipe = find_task(plan.task), _without(recipe, plan.unfit)
    tables = {
        "task": [
            KeyLine("kind", plan.task),
            *_init(choice),
            *_lines_with_comments(_task_keys(plan, recipe), task.new.comments),
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
    """Return comment lines with advice if a simple baseline is usually better than this model."""
    if not recipe.below:
        return []
    return [
        f"# On this little data, a Transformer from scratch usually stays below {recipe.below}. What helps: more data,",
        "# or a checkpoint to start from, in the language of your text, such as this English one:",
        f"#   {plan.command} --init {CHECKPOINT}",
    ]


def _init(choice: RunFileChoice) -> list[KeyLine]:
    if choice.start is None:
        return []
    return [KeyLine("init", choice.start.reference, "the checkpoint to start from, with its model and tokenizer")]


def _lora(choice: RunFileChoice) -> list[KeyLine]:
    if choice.start is None or choice.start.rank is None:
        return []
    comment = f"rank of the only trained matrices, which are added to the attention, because {choice.start.why}"
    return [KeyLine("rank", choice.start.rank, comment)]


def _export_note(saved_as: str) -> str:
    if saved_as:
        return f"`clearhead convert --to hf` saves the trained model as {saved_as}."
    return "No Hugging Face architecture can express this model: `clearhead convert --to hf` refuses it."


def _lines_with_comments(values: Mapping[str, Value], comments: Mapping[str, str]) -> list[KeyLine]:
    """Return lines for the keys in the order of their comments; keys without a comment follow."""
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
        settings.append(KeyLine("pack", True, "short documents share a block without attending to each other"))
    return settings


def _tokenizer(plan: DataPlan, task: Task, recipe: Recipe, choice: RunFileChoice) -> list[KeyLine]:
    kind = tokenizer_kind(recipe, plan.survey)
    size = vocab_size(recipe, plan.survey, num_special=data_of(plan.task).num_signs(choice.max_length))
    if kind == "split":
        comment = 'the text is already segmented: its "@@ " marks are joined in the output'
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
        *_lines_with_comments(recipe.model.keys, _MODEL),
        KeyLine("dropout", size.dropout, "use more for little data"),
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
        *_lines_with_comments(values, _TRAIN),
        KeyLine("precision", "auto", "auto | fp32 | bf16"),
        KeyLine("device", "auto", "auto | cpu | cuda | mps"),
        KeyLine("seed", 1, "seed of weights, order and dropout"),
        KeyLine("validate_every", every, "steps; each validation also saves a checkpoint"),
        KeyLine("keep", 3, "checkpoints to keep besides the best one"),
        KeyLine("snapshots", 10, "steps at logarithmic distances whose weights are kept for `view --checkpoints`"),
        KeyLine("snapshot_megabytes", 1000, "the most megabytes of these snapshots: a large model has fewer"),
        KeyLine("early_stop", best, stop),
    ]
