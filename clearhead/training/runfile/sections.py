"""The tables and keys of a run file, as frozen types with their defaults.

The tables [task] and [data] are those of the kind of task. A key whose default depends on another key is None here and
filled by `clearhead.training.runfile.rules.fill_defaults`, so that a given key without effect can be reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Final, Literal, Union

from pydantic import Discriminator, Field, Tag, create_model

from clearhead.data.sources.run_file_tables import Count, Form, Positive, Section, Share, form_of
from clearhead.spec.base import MOST_LAYERS
from clearhead.tasks.data import DataSection, TaskSection, data_of
from clearhead.tasks.registry import find, kinds

SUBWORD_KINDS = ("bpe", "byte-bpe", "unigram", "wordpiece")

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
CountOrZero = Annotated[int, Field(ge=0)]
Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]


class TokenizerSection(Section):
    """The tokenizer: trained for the run (kind) or loaded from a file or folder (path)."""

    kind: Literal["bpe", "byte-bpe", "unigram", "wordpiece", "word", "character", "byte", "split"] | None = None
    path: str | None = None
    vocab_size: Annotated[int, Field(ge=8)] | None = None
    joint: bool | None = None


_OWN = Field(description='a table of an own part with its kind, such as { kind = "gated_recurrence" }')
OwnPart = Annotated[dict[str, Any] | None, _OWN]


class ModelSection(Section):
    """The model: a preset or a spec file, and changes to the preset; None keeps its value.

    Own parts, from the file `parts` or an installed package: `mixer` stands in place of each self-attention, `network`
    of each feed-forward network, `own_norm` of each norm in the layers and after them, `own_position` of the positions
    of an embedding; `score_step` and `weight_step` are steps of each self-attention.
    """

    family: Literal["encoder", "decoder", "encoder-decoder"] | None = None
    preset: str | None = None
    spec: str | None = None
    layers: Layers | None = None
    encoder_layers: Layers | None = None
    decoder_layers: Layers | None = None
    width: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_size: Count | None = None
    feedforward: Count | None = None
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] | None = None
    gated: bool | None = None
    norm: Literal["layer", "rms"] | None = None
    norm_place: Literal["post", "pre"] | None = None
    positions: Literal["sinusoidal", "learned", "rotary", "alibi", "buckets"] | None = None
    max_positions: Count | None = None
    dropout: Fraction | None = None
    attention_dropout: Fraction | None = None
    activation_dropout: Fraction | None = None
    window: Count | None = None
    qk_norm: bool | None = None
    bias: bool | None = None
    tie: Literal["all", "decoder", "none"] | None = None
    initialization: Literal["xavier", "normal"] | None = None
    parts: str | None = None
    mixer: OwnPart = None
    network: OwnPart = None
    own_norm: OwnPart = None
    own_position: OwnPart = None
    score_step: OwnPart = None
    weight_step: OwnPart = None


class Lora(Section):
    """Low-rank adaptation (LoRA) of an initial model, whose own weights are frozen."""

    rank: Count
    alpha: Positive | None = None
    dropout: Fraction = 0.0
    targets: Annotated[tuple[str, ...], Field(strict=False)] | None = Field(
        default=None, description='a list of addresses, such as ["**.query", "**.value"]'
    )


class EarlyStop(Section):
    """Stop when the metric has not improved for `patience` validations."""

    metric: Literal["loss", "bleu", "score"] = "loss"
    patience: Count = 10


class Train(Section):
    """Length, optimizer, validation and checkpoints.

    `warmup` and `validate_every` are steps or a share of all; `seconds` ends a run of `steps` or `epochs` early. A run
    of `steps` that takes much less than `planned_minutes` says so. `snapshots` are the weights alone of so many steps,
    spaced like a logarithm: fewer where they are too large.
    """

    run: Annotated[str, Field(min_length=1)]
    steps: Count | None = None
    epochs: Positive | None = None
    seconds: Positive | None = None
    planned_minutes: Positive | None = None
    batch_tokens: Count = 4096
    accumulate: Count = 1
    optimizer: Literal["adam", "adamw", "muon"] = "adamw"
    learning_rate: Positive | None = None
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = Field(
        default=(0.9, 0.98), description="a list of 2 numbers, each at least 0 and below 1"
    )
    eps: Positive = 1e-9
    schedule: Literal["paper", "inverse-sqrt", "cosine", "linear", "wsd", "plateau", "constant"] = "inverse-sqrt"
    warmup: CountOrZero | Share | None = Field(
        default=None, description="a number of steps from 0 on, or a share of all steps such as 0.1"
    )
    label_smoothing: Fraction = 0.0
    clip: Positive | None = None
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    activation_checkpointing: bool = False
    device: str = "auto"
    threads: Count | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    validate_every: Count | Share = Field(
        default=500, description="a number of steps from 1 on, or a share of all steps such as 0.1"
    )
    bleu_sentences: CountOrZero | None = None
    save_every: Count | None = None
    keep: Count = 3
    snapshots: CountOrZero = 10
    snapshot_megabytes: Count = 1000
    average: Annotated[int, Field(ge=2)] | None = None
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    early_stop: EarlyStop | None = None
    tracker: Literal["none", "trackio", "wandb", "tensorboard"] = "none"


class RunFile(Section):
    """A run file; the tables [task] and [data] are those of its kind of task."""

    task: TaskSection
    data: DataSection
    tokenizer: TokenizerSection = TokenizerSection()
    model: ModelSection = ModelSection()
    lora: Lora | None = None
    train: Train


TABLES: Final = tuple(RunFile.model_fields)


@cache
def run_file_type(kind: str | None) -> type[RunFile]:
    """Return the type of the run files of a kind of task.

    Args:
        kind: of the task; None: not known, so that [task] and [data] may have the keys of any kind.
    """
    if kind is None:
        tasks, tables = zip(*((data.task, data.data) for data in map(data_of, kinds())), strict=True)
        task = create_model("TaskSection", __base__=TaskSection, **_keys_of(tasks, TaskSection))
        named: dict[str, Any] = {"train": (Any, ...), "valid": (Any, ...), **_keys_of(tables, DataSection)}
        return _run_file_type(task, create_model("DataSection", __base__=DataSection, **named))
    data = data_of(kind)
    valid = _names(data.forms, can_be_share=not find(kind).is_paired)
    named = {"train": (_names(data.forms), ...), "valid": (valid, ...)}
    return _run_file_type(data.task, create_model(data.data.__name__, __base__=data.data, **named))


def _run_file_type(task: type[TaskSection], data: type[DataSection]) -> type[RunFile]:
    return create_model("RunFile", __base__=RunFile, task=(task, ...), data=(data, ...))


def _keys_of(tables: Sequence[type[Section]], base: type[Section]) -> dict[str, Any]:
    """Return the keys that some of the tables have beside those of all, with any value."""
    return {key: (Any, None) for table in tables for key in table.model_fields if key not in base.model_fields}


def _names(forms: Sequence[type[Form]], *, can_be_share: bool = False) -> Any:
    """Return the type of what names data in one of some forms, which the keys of a table decide."""

    def tag_of(table: object) -> str | None:
        if isinstance(table, int | float):
            return "by share" if can_be_share else None
        form = form_of(table, forms) if isinstance(table, Mapping) else type(table)
        # A tag is never a valid key.
        return f"by {form.marker()}" if form is not None and issubclass(form, Form) else None

    tagged = [Annotated[form, Tag(f"by {form.marker()}")] for form in forms]
    return Annotated[Union[(*tagged, Annotated[Share, Tag("by share")])], Discriminator(tag_of)]


def sections_of(kind: str | None) -> dict[str, type[Section]]:
    """Return the types of the tables of a kind of task; None: of any kind."""
    types: dict[str, Any] = {name: field.annotation for name, field in run_file_type(kind).model_fields.items()}
    return {**types, "lora": Lora}
