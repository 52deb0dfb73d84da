"""Tables and keys of a run file as frozen types, the rules between their keys, and their defaults.

The tables [task] and [data] depend on the kind of task. If the default of a key depends on other keys, the key is None
until `fill_defaults` sets it. A key without effect can therefore be reported. The rules check valid values only, so a
fault in one key does not hide a fault between others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_type_hints

from pydantic import Discriminator, Field, Tag, create_model

from clearhead.base.errors import InputError
from clearhead.data.sources.run_file_tables import Count, Form, Positive, RunFileSection, Share, form_of
from clearhead.data.task_tables import DataSection, TaskSection, data_of
from clearhead.spec.presets.hyperparameters import PRESET_ONLY, Hyperparameters
from clearhead.spec.tasks.base import Family
from clearhead.spec.tasks.registry import find_task, task_kinds
from clearhead.training.optim.schedules import SCHEDULES_WITH_AN_END, SCHEDULES_WITH_WARMUP

SUBWORD_KINDS = ("bpe", "byte-bpe", "unigram", "wordpiece")

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
CountOrZero = Annotated[int, Field(ge=0)]


class TokenizerSection(RunFileSection):
    """The [tokenizer] table: `kind` trains a tokenizer for the run, `path` loads one from a file or folder."""

    #: The kind of token: pieces of words (bpe, byte-bpe, unigram, wordpiece), words, characters or bytes. With split,
    #: tokens are the units between the spaces of an already segmented text.
    kind: Literal["bpe", "byte-bpe", "unigram", "wordpiece", "word", "character", "byte", "split"] | None = None
    #: An existing tokenizer in place of a trained one: a tokenizer.json, or a folder with one.
    path: str | None = None
    #: The maximum vocabulary size of a trained tokenizer, special tokens included; not for byte, which has 256 bytes.
    vocab_size: Annotated[int, Field(ge=8)] | None = None
    #: Whether source and target share one tokenizer, so that they can share one embedding table.
    joint: bool | None = None


_EXTENSION = Field(description='a table of a custom module with its kind, such as { kind = "gated_recurrence" }')
ExtensionTable = Annotated[dict[str, Any] | None, _EXTENSION]


class ModelSource(RunFileSection):
    """The keys of [model] for the base of the model: a preset, which the other keys change, or a spec file."""

    #: The family of the model, which decides its stacks; a task allows some families.
    family: Family | None = None
    #: The preset that the other keys change.
    preset: str | None = None
    #: A spec.json that describes the whole model; only family and parts are allowed with it.
    spec: str | None = None


def _hyperparameter_keys() -> dict[str, Any]:
    """Return the keys of [model] that change a preset: hyperparameters, where None keeps the value of the preset."""
    names = [field.name for field in fields(Hyperparameters) if field.name not in PRESET_ONLY | {"family"}]
    types = get_type_hints(Hyperparameters, include_extras=True)
    return {name: (types[name] | None, None) for name in names}


_WithChanges = create_model("ModelSection", __base__=ModelSource, **_hyperparameter_keys())


class ModelSection(_WithChanges):  # type: ignore[misc, valid-type] # made from Hyperparameters
    """The [model] table: a preset or a spec file, and changes to the preset; None keeps the value of the preset.

    Custom modules come from the file `parts` or from an installed package. `mixer` replaces each self-attention,
    `network` each feed-forward network, `own_norm` each norm in the layers and after them, and `own_position` the
    positions of an embedding. `score_step` and `weight_step` are steps of each self-attention.
    """

    #: A Python file with custom modules for the keys below; a relative path starts at the folder of the run file.
    parts: str | None = None
    #: A custom module that replaces each self-attention.
    mixer: ExtensionTable = None
    #: A custom module that replaces each feed-forward network.
    network: ExtensionTable = None
    #: A custom module that replaces each norm in the layers and after them.
    own_norm: ExtensionTable = None
    #: A custom module that replaces the positions of an embedding.
    own_position: ExtensionTable = None
    #: A custom module that changes the scores of each self-attention before the mask.
    score_step: ExtensionTable = None
    #: A custom module that replaces the softmax of each self-attention.
    weight_step: ExtensionTable = None


class Lora(RunFileSection):
    """Low-rank adaptation (LoRA) of an initial model; the weights of the initial model are frozen."""

    #: The rank of the two matrices whose product is added to each adapted matrix.
    rank: Count
    #: The product is multiplied by alpha / rank; without alpha by 2.
    alpha: Positive | None = None
    #: The share of the inputs that is set to 0 in training.
    dropout: Fraction = 0.0
    #: The addresses (or patterns) of the matrices to adapt; default: those of the attention.
    targets: Annotated[tuple[str, ...], Field(strict=False)] | None = Field(
        default=None, description='a list of addresses, such as ["**.query", "**.value"]'
    )


class EarlyStop(RunFileSection):
    """Early stopping: training ends if the metric has not improved for `patience` validations."""

    #: The metric: validation loss, BLEU, or the score of the task; it also decides which checkpoint is best.
    metric: Literal["loss", "bleu", "score"] = "loss"
    #: The number of validations in a row without improvement after which training ends.
    patience: Count = 10


class Train(RunFileSection):
    """The [train] table: length, optimizer, validation and checkpoints.

    `warmup` and `validate_every` are steps, or a share of all steps. `seconds` ends a run of `steps` or `epochs` early.
    If a run of `steps` takes much less time than `planned_minutes`, a message says so. `snapshots` is the number of
    steps, spaced logarithmically, of which the weights alone are kept; large models keep fewer.
    """

    #: The run directory, which training creates.
    run: Annotated[str, Field(min_length=1)]
    #: The number of optimizer steps.
    steps: Count | None = None
    #: The number of passes over the training data, instead of `steps`.
    epochs: Positive | None = None
    #: The time in seconds after which the run ends, even before `steps` or `epochs`; schedules still count steps.
    seconds: Positive | None = None
    #: The time that `clearhead new` planned; after a much shorter run, a message says how to make it longer.
    planned_minutes: Positive | None = None
    #: The maximum number of tokens in a batch, padding included, over all processes and before accumulation.
    batch_tokens: Count = 4096
    #: The number of batches whose gradients are summed for one step.
    accumulate: Count = 1
    #: The optimizer; muon orthogonalizes the updates of matrices.
    optimizer: Literal["adam", "adamw", "muon"] = "adamw"
    #: The peak learning rate; for the schedule paper a factor of its formula.
    learning_rate: Positive | None = None
    #: The share of each matrix, times the learning rate, subtracted at each step (adam: added to its gradient).
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    #: The decay of the averages of gradients and of their squares; closer to 1 is slower.
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = Field(
        default=(0.9, 0.98), description="a list of 2 numbers, each at least 0 and below 1"
    )
    #: The number added to the root of the averaged squares, against a division by 0.
    eps: Positive = 1e-9
    #: The learning rate after the warm-up. It falls to 0 along a curve (cosine), along a line (linear) or only at the
    #: end (wsd). It is proportional to 1 / sqrt(step) with inverse-sqrt and paper. With plateau it is halved if the
    #: validation loss does not fall.
    schedule: Literal["paper", "inverse-sqrt", "cosine", "linear", "wsd", "plateau", "constant"] = "inverse-sqrt"
    #: The number of steps, or the share of all steps, in which the learning rate rises from 0.
    warmup: CountOrZero | Share | None = Field(
        default=None, description="a number of steps from 0 on, or a share of all steps such as 0.1"
    )
    #: The share of probability that is moved from the right token to all others.
    label_smoothing: Fraction = 0.0
    #: The maximum norm of all gradients together; larger gradients are scaled down to it.
    clip: Positive | None = None
    #: The precision of products in training; auto takes the fastest that is safe on this processor.
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    #: Whether layers are compiled by PyTorch (true or false); auto compiles on a GPU if the run becomes shorter.
    compile: Literal["auto"] | bool = Field(default="auto", description='"auto", true or false')
    #: The engine of several processes: copies of the model (ddp), or shards of its weights (fsdp); auto takes ddp if
    #: the training fits.
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    #: The time in seconds that a step waits for the other processes; a checkpoint must be written in this time.
    timeout: Positive = 1800.0
    #: Whether the activations of a layer are recomputed in the backward pass: less memory, more time.
    activation_checkpointing: bool = False
    #: The device: auto, cpu, cuda, cuda:N or mps.
    device: str = "auto"
    #: The number of processor threads; default: the choice of PyTorch.
    threads: Count | None = None
    #: The seed of weights, order of the data and dropout; the same seed gives the same run.
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    #: The steps between two validations, or their share of all steps; a validation also saves a checkpoint.
    validate_every: Count | Share = Field(
        default=500, description="a number of steps from 1 on, or a share of all steps such as 0.1"
    )
    #: The number of validation pairs that are translated for BLEU at each validation; 0: none.
    bleu_sentences: CountOrZero | None = None
    #: The number of steps between two checkpoints, in addition to those of validations.
    save_every: Count | None = None
    #: The number of last checkpoints to keep, in addition to the best one.
    keep: Count = 3
    #: The number of logarithmically spaced steps of which the weights alone are kept, for `clearhead view
    #: --checkpoints`; 0: none.
    snapshots: CountOrZero = 10
    #: The maximum size of all snapshots together, in megabytes; a large model keeps fewer.
    snapshot_megabytes: Count = 1000
    #: The number of last validated weights that are averaged at the end, as RUN@averaged.
    average: Annotated[int, Field(ge=2)] | None = None
    #: The decay of a moving average of the weights, which is validated and used instead; closer to 1 is slower.
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    #: Early stopping, which ends training if a metric does not improve.
    early_stop: EarlyStop | None = None
    #: The tracker that also gets the curves of `metrics.jsonl`; each needs the extra of its name.
    tracker: Literal["none", "trackio", "wandb", "tensorboard"] = "none"


class RunFile(RunFileSection):
    """A run file; its kind of task decides the types of the tables [task] and [data]."""

    task: TaskSection
    data: DataSection
    tokenizer: TokenizerSection = TokenizerSection()
    model: ModelSection = ModelSection()
    lora: Lora | None = None
    train: Train


TABLES: Final = tuple(RunFile.model_fields)


@cache
def run_file_type(kind: str | None) -> type[RunFile]:
    """Return the run file type for a kind of task.

    Args:
        kind: the kind of the task. None means that it is not known; [task] and [data] may then have the keys of any
            kind.
    """
    if kind is None:
        tasks, tables = zip(*((data.task, data.data) for data in map(data_of, task_kinds())), strict=True)
        task = create_model("TaskSection", __base__=TaskSection, **_keys_of(tasks, TaskSection))
        named: dict[str, Any] = {"train": (Any, ...), "valid": (Any, ...), **_keys_of(tables, DataSection)}
        return _run_file_type(task, create_model("DataSection", __base__=DataSection, **named))
    data = data_of(kind)
    valid = _data_type(data.forms, can_be_share=True)
    named = {"train": (_data_type(data.forms), ...), "valid": (valid, ...)}
    return _run_file_type(data.task, create_model(data.data.__name__, __base__=data.data, **named))


def _run_file_type(task: type[TaskSection], data: type[DataSection]) -> type[RunFile]:
    return create_model("RunFile", __base__=RunFile, task=(task, ...), data=(data, ...))


def _keys_of(tables: Sequence[type[RunFileSection]], base: type[RunFileSection]) -> dict[str, Any]:
    """Return pydantic fields for the keys that tables add to their base class; they accept any value."""
    return {key: (Any, None) for table in tables for key in table.model_fields if key not in base.model_fields}


def _data_type(forms: Sequence[type[Form]], *, can_be_share: bool = False) -> Any:
    """Return the pydantic type of a key that names data; the keys of a value decide which form it is parsed as."""

    def tag_of(table: object) -> str | None:
        if isinstance(table, int | float):
            return "by share" if can_be_share else None
        form = form_of(table, forms) if isinstance(table, Mapping) else type(table)
        # A tag is never a valid key.
        return f"by {form.marker()}" if form is not None and issubclass(form, Form) else None

    tagged = [Annotated[form, Tag(f"by {form.marker()}")] for form in forms]
    return Annotated[Union[(*tagged, Annotated[Share, Tag("by share")])], Discriminator(tag_of)]


def sections_of(kind: str | None) -> dict[str, type[RunFileSection]]:
    """Return the types of the tables for a kind of task; None means any kind."""
    types: dict[str, Any] = {name: field.annotation for name, field in run_file_type(kind).model_fields.items()}
    return {**types, "lora": Lora}


LENGTHS = ("steps", "epochs")
_DEVICES = ("auto", "cpu", "cuda", "mps")
Kind = TypeVar("Kind", bound=RunFileSection)


Address = tuple[str, ...]


@dataclass(frozen=True)
class Fault:
    """One fault: its address, its message, and whether it only follows from another fault."""

    address: Address
    sentence: str
    follows: bool = False


def name_of(address: Address) -> str:
    """Return the name of an address in messages: "[train] steps", or "[train]" for a table."""
    return " ".join([f"[{address[0]}]", ".".join(address[1:])]).strip()


def only_for(kind: str | None, homes: Iterable[str]) -> str:
    """Return the message about a key that only other tasks use: "has no effect for the task 'fill', ..."."""
    *others, last = map(repr, homes)
    tasks = f"{', '.join(others)} and {last}" if others else last
    return f"has no effect for the task '{kind}', only for {tasks}; remove it"


# Keys of [model] that are allowed with [task] init: they change the training, not the architecture.
INNER_DROPOUTS: Final = ("attention_dropout", "activation_dropout")
DROPOUTS: Final = ("dropout", *INNER_DROPOUTS)


def check_rules(run: RunFile, faulty: Collection[Address] = ()) -> list[Fault]:
    """Return every fault between keys with valid values.

    Args:
        run: the run file, with placeholders for keys with wrong values.
        faulty: the addresses of the placeholders; faults that depend on a placeholder are dropped.
    """
    of_any_task = (
        _lora_faults,
        _sizes_faults,
        _positions_faults,
        _length_faults,
        _schedule_faults,
        _snapshots_faults,
        _device_faults,
    )
    of_the_task = (_task_faults, _data_faults, _tokenizer_faults, _model_faults, _validation_faults)
    rules = of_any_task if has_fault(faulty, "task", "kind") else of_the_task + of_any_task
    faults = [fault for rule in rules for fault in rule(run)]
    return [fault for fault in faults if not (fault.address[0] == "data" and has_fault(faulty, *fault.address[:2]))]


def has_fault(faulty: Collection[Address], table: str, key: str) -> bool:
    """Return whether a key, a value inside it, or its whole table has a fault."""
    return any(address[:2] in ((table,), (table, key)) for address in faulty)


def _fault(address: str, sentence: str) -> Fault:
    """Return a fault; its message starts with the name of the key."""
    parts: Address = tuple(address.split("."))
    return Fault(parts, f"{name_of(parts)} {sentence}")


def _without_effect(table: str, keys: Sequence[str], why: str) -> Iterator[Fault]:
    """Yield one fault that lists all keys of a table that have no effect; nothing if there are none."""
    if len(keys) == 1:
        yield _fault(f"{table}.{keys[0]}", f"has no effect {why}; remove it")
    elif keys:
        yield _fault(f"{table}.{keys[0]}", f"and {', '.join(keys[1:])} have no effect {why}; remove them")


def _task_faults(run: RunFile) -> Iterator[Fault]:
    for key, sentence in run.task.faults(family_of(run)):
        yield _fault(f"task.{key}", sentence)


def _data_faults(run: RunFile) -> Iterator[Fault]:
    data = run.data
    for name, table in (("train", data.train), ("valid", data.valid)):
        try:
            if isinstance(table, Form):
                table.as_source()
        except InputError as error:
            yield _fault(f"data.{name}", f"is not usable: {error}")
    for key, sentence in data.faults():
        yield _fault(f"data.{key}", sentence)
    if data.stream and not data_of(run.task.kind).streams:
        yield _fault("data.stream", only_for(run.task.kind, [kind for kind in task_kinds() if data_of(kind).streams]))
    elif data.stream and run.train.epochs is not None:
        yield _fault(
            "train.epochs",
            "counts passes, but the number of steps in a pass over a streamed text is known only at its end: give "
            "'steps' or 'seconds'; the first lines of the run estimate the steps in a pass",
        )


def family_of(run: RunFile) -> Family:
    """Return the family of the model."""
    return run.model.family or find_task(run.task.kind).families[0]


def _tokenizer_faults(run: RunFile) -> Iterator[Fault]:
    tokenizer = run.tokenizer
    if run.task.init:
        yield from _without_effect(
            "tokenizer", _find_changed_keys(tokenizer), "with [task] init, which has its own tokenizer"
        )
        return
    if tokenizer.kind is None and tokenizer.path is None:
        yield _fault("tokenizer", "needs 'kind' (train one on the training text) or 'path' (use an existing one)")
    if tokenizer.path is not None:
        yield from _without_effect(
            "tokenizer", [key for key in _find_changed_keys(tokenizer) if key != "path"], "with 'path'"
        )
    elif tokenizer.joint is not None and not find_task(run.task.kind).has_two_vocabularies:
        yield _fault(
            "tokenizer.joint", f"has no effect for the task '{run.task.kind}', which has one tokenizer; remove it"
        )
    elif tokenizer.kind == "byte" and tokenizer.vocab_size is not None:
        yield _fault("tokenizer.vocab_size", "has no effect for kind 'byte', which always has the 256 bytes; remove it")


def _model_faults(run: RunFile) -> Iterator[Fault]:
    model = run.model
    kind, allowed = run.task.kind, find_task(run.task.kind).families
    if run.task.init:
        keys = [key for key in _find_changed_keys(model) if key not in (*DROPOUTS, "parts")]
        yield from _without_effect("model", keys, "with [task] init, which has its own model")
        return
    if model.family is not None and model.family not in allowed:
        families = " or ".join(f"'{family}'" for family in allowed)
        yield _fault("model.family", f"must be {families} for the task '{kind}', got '{model.family}'")
    if model.spec is not None:
        others = [key for key in _find_changed_keys(model) if key not in ("spec", "family", "parts")]
        yield from _without_effect("model", others, "with 'spec', which describes the whole model")
    one_stack = [key for key in ("encoder_layers", "decoder_layers") if getattr(model, key) is not None]
    if one_stack and family_of(run) != "encoder-decoder":
        yield _fault(
            f"model.{one_stack[0]}", f"is for two stacks; a model with only one ({family_of(run)}) takes 'layers'"
        )
    if model.layers is not None and model.encoder_layers is not None and model.decoder_layers is not None:
        yield _fault("model.layers", "has no effect with 'encoder_layers' and 'decoder_layers'; remove it")
    if model.tie == "all" and run.tokenizer.joint is False:
        yield _fault("model.tie", "= 'all' shares one table between both sides, which needs [tokenizer] joint = true")


def _lora_faults(run: RunFile) -> Iterator[Fault]:
    if run.lora is None:
        return
    if not run.task.init:
        yield _fault("lora", "adapts a trained model, so it needs one: name it as [task] init")
    if run.train.optimizer == "muon":
        yield _fault(
            "train.optimizer", "= 'muon' makes updates orthogonal, which does not suit low-rank matrices; use 'adamw'"
        )


def _sizes_faults(run: RunFile) -> Iterator[Fault]:
    model = run.model
    if model.width and model.heads and model.head_size is None and model.width % model.heads:
        yield _fault("model.heads", f"must divide the width: {model.width} is not a multiple of {model.heads}")
    if model.heads and model.kv_heads and model.heads % model.kv_heads:
        yield _fault("model.kv_heads", f"must divide the heads: {model.heads} is not a multiple of {model.kv_heads}")


def _positions_faults(run: RunFile) -> Iterator[Fault]:
    limit = run.model.max_positions
    if limit is not None and limit < run.data.max_length:
        yield _fault(
            "model.max_positions",
            f"= {limit} is less than [data] max_length = {run.data.max_length}: raise it, or lower max_length",
        )


def _length_faults(run: RunFile) -> Iterator[Fault]:
    train = run.train
    if not _has_known_end(train) and train.seconds is None:
        yield _fault("train", "must say how long to train: steps, epochs or seconds")
    if train.steps is not None and train.epochs is not None:
        yield _fault("train.epochs", "conflicts with 'steps': give one of both; 'seconds' may end either early")


def _has_known_end(train: Train) -> bool:
    """Return whether the number of steps is known in advance, as schedules and shares need."""
    return train.steps is not None or train.epochs is not None


def _schedule_faults(run: RunFile) -> Iterator[Fault]:
    train = run.train
    only_time = train.seconds is not None and not _has_known_end(train)
    if train.schedule in SCHEDULES_WITH_AN_END and only_time:
        yield _fault(
            "train.schedule",
            f"= '{train.schedule}' ends at a known step, so it needs 'steps' or 'epochs', not only 'seconds'",
        )
    if train.schedule in SCHEDULES_WITH_WARMUP and train.warmup == 0:
        yield _fault("train.warmup", f"must be at least 1 for the schedule '{train.schedule}', got 0")
    if train.schedule in SCHEDULES_WITH_AN_END and train.steps is not None and (train.warmup or 0) >= train.steps:
        yield _fault("train.warmup", f"= {train.warmup} must be less than the {train.steps} steps of the run")
    if train.planned_minutes is not None and train.steps is None:
        yield _fault("train.planned_minutes", "has no effect without 'steps', which it was planned for; remove it")
    for key in ("warmup", "validate_every"):
        if only_time and isinstance(share := getattr(train, key), float):
            yield _fault(
                f"train.{key}",
                f"= {share} is a share of all steps, which 'seconds' alone leaves open: give a number of steps",
            )


def _snapshots_faults(run: RunFile) -> Iterator[Fault]:
    if not run.train.snapshots:
        keys = [key for key in _find_changed_keys(run.train) if key == "snapshot_megabytes"]
        yield from _without_effect("train", keys, "with 'snapshots' = 0, which keeps none")


def _validation_faults(run: RunFile) -> Iterator[Fault]:
    train, task = run.train, find_task(run.task.kind)
    if train.label_smoothing and not task.smooths_labels:
        yield _fault("train.label_smoothing", f"has no effect for the task '{task.kind}'; remove it")
    if not task.scores_translations:
        if train.bleu_sentences is not None:
            yield _fault("train.bleu_sentences", f"has no effect for the task '{run.task.kind}'; remove it")
        if train.early_stop is not None and train.early_stop.metric == "bleu":
            yield _fault("train.early_stop.metric", "= 'bleu' is for the task 'translate'; use 'score' or 'loss'")
    if train.early_stop is not None and train.early_stop.metric == "bleu" and train.bleu_sentences == 0:
        yield _fault(
            "train.bleu_sentences", "= 0 conflicts with early_stop metric 'bleu', which needs sentences to translate"
        )


def _device_faults(run: RunFile) -> Iterator[Fault]:
    if run.train.device.split(":")[0] not in _DEVICES:
        yield _fault(
            "train.device", f"must be one of {', '.join(_DEVICES)} or cuda:N, got the text '{run.train.device}'"
        )
    if run.train.threads is not None:
        # Imported late: torch is slow to import, and faults in the run file should be reported before.
        from clearhead.base.machine import too_many_threads

        fault = too_many_threads(run.train.threads)
        if fault is not None:
            yield _fault("train.threads", f"= {fault}")


def _find_changed_keys(section: RunFileSection) -> list[str]:
    """Return the keys of a table whose values differ from their defaults."""
    return [name for name, info in type(section).model_fields.items() if getattr(section, name) != info.default]


def fill_defaults(run: RunFile) -> RunFile:
    """Return a run file in which every key whose default depends on other keys is set."""
    return run.model_copy(
        update={
            "task": _fill_section(run.task, run.task.defaults(family_of(run))),
            "data": _fill_section(run.data, run.data.defaults()),
            "tokenizer": _fill_section(run.tokenizer, _tokenizer_defaults(run)),
            "model": _fill_section(run.model, _model_defaults(run)),
            "train": _fill_section(run.train, _train_defaults(run)),
        }
    )


def _fill_section(section: Kind, defaults: dict[str, object]) -> Kind:
    return section.model_copy(update={key: value for key, value in defaults.items() if getattr(section, key) is None})


def _tokenizer_defaults(run: RunFile) -> dict[str, object]:
    if run.tokenizer.kind is None:
        return {}
    defaults: dict[str, object] = {"joint": True} if find_task(run.task.kind).has_two_vocabularies else {}
    if run.tokenizer.kind in SUBWORD_KINDS:
        defaults["vocab_size"] = 8000
    return defaults


def _model_defaults(run: RunFile) -> dict[str, object]:
    if run.model.spec is not None or run.task.init:
        return {}
    two_vocabularies = run.tokenizer.joint is False
    tie = {"tie": "decoder"} if two_vocabularies else {}
    return {"family": family_of(run), "preset": "transformer", **tie}


def _train_defaults(run: RunFile) -> dict[str, object]:
    train = run.train
    defaults: dict[str, object] = {"learning_rate": _learning_rate(train), "warmup": _warmup(train)}
    if find_task(run.task.kind).scores_translations:
        stops_by_bleu = train.early_stop is not None and train.early_stop.metric == "bleu"
        defaults["bleu_sentences"] = 500 if stops_by_bleu else 100
    return defaults


def _learning_rate(train: Train) -> float:
    return 1.0 if train.schedule == "paper" else 1e-3


def _warmup(train: Train) -> int | float:
    if train.schedule in ("constant", "plateau"):
        return 0
    if train.schedule in SCHEDULES_WITH_AN_END:
        return 0.1
    return max(1, min(2000, train.steps // 5)) if train.steps is not None else 1000
