"""The tables and keys of a run file, as frozen types with their defaults.

A key whose default depends on another key is None here and filled by `clearhead.training.runfile.rules.fill_defaults`,
so that a given key without effect can be reported.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from clearhead.printing import Printed
from clearhead.spec.base import MOST_LAYERS
from clearhead.task import LabelKind, TaskKind

SUBWORD_KINDS = ("bpe", "byte-bpe", "unigram", "wordpiece")

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(gt=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Positive = Annotated[float, Field(gt=0.0)]


class Section(Printed, BaseModel):
    """One table of a run file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Task(Section):
    """The task, and the initial model."""

    kind: TaskKind
    init: str = ""
    from_language: str | None = None
    to_language: str | None = None
    objective: Literal["causal", "prefix"] | None = None
    noise: Literal["spans", "infill"] | None = None
    noise_share: Share | None = None
    mean_span: Annotated[float, Field(ge=1.0)] | None = None
    mask_share: Share | None = None
    whole_words: bool | None = None
    labels: LabelKind | None = None
    pool: Literal["first", "mean", "last"] | None = None
    temperature: Positive | None = None


class FilePair(Section):
    """Two files, line by line."""

    source: str
    target: str


class TsvTable(Section):
    """One file of tab-separated columns; a column is a number from 1 or a name in the first line."""

    tsv: str
    source_column: int | str = 1
    target_column: int | str = 2


class JsonLines(Section):
    """One JSON object per line."""

    jsonl: str
    source_field: str = "source"
    target_field: str = "target"


class TextTable(Section):
    """Single texts: a file, a folder or JSON lines, with labels for tasks with labels."""

    text: str
    field: str | None = None
    document: Literal["file", "line", "paragraph"] | None = None
    pattern: str | None = None
    labels: str | int | None = None
    text_column: str | int | None = None
    pair: str | int | None = None


class HubDataset(Section):
    """A Hugging Face dataset by name; its fields depend on the task."""

    dataset: str
    split: str
    config: str | None = None
    source_field: str | None = None
    target_field: str | None = None
    field: str | None = None
    labels: str | None = None
    pair: str | None = None


SOURCE_FORMS: dict[str, type[Section]] = {
    "source": FilePair,
    "text": TextTable,
    "tsv": TsvTable,
    "jsonl": JsonLines,
    "dataset": HubDataset,
}


def _form_of(table: Any) -> str | None:
    """Return the tag of a data table's form, by the key that only this form has; a tag is never a valid key."""
    if isinstance(table, Section):
        return next(f"by {name}" for name, form in SOURCE_FORMS.items() if isinstance(table, form))
    if isinstance(table, int | float):
        return "by share"
    if not isinstance(table, dict):
        return None
    for key in ("text", "tsv", "jsonl", "dataset"):
        if key in table:
            return f"by {key}"
    return "by source" if "source" in table or "target" in table else None


_Tables = (
    Annotated[FilePair, Tag("by source")]
    | Annotated[TextTable, Tag("by text")]
    | Annotated[TsvTable, Tag("by tsv")]
    | Annotated[JsonLines, Tag("by jsonl")]
    | Annotated[HubDataset, Tag("by dataset")]
)
Source = Annotated[_Tables, Discriminator(_form_of)]
SourceOrShare = Annotated[_Tables | Annotated[Share, Tag("by share")], Discriminator(_form_of)]


class Data(Section):
    """The training and validation data; a number for `valid` takes that share from the end of `train`.

    With `stream`, the training text is read and tokenized while the run goes on, `shuffle_buffer` characters at a time.
    """

    train: Source
    valid: SourceOrShare
    max_length: Annotated[int, Field(ge=2)] = 128
    max_ratio: Annotated[float, Field(ge=1.0)] | None = None
    pack: bool | None = None
    stream: bool = False
    shuffle_buffer: Count | None = None


class TokenizerSection(Section):
    """The tokenizer: trained for the run (kind) or loaded from a file or folder (path)."""

    kind: Literal["bpe", "byte-bpe", "unigram", "wordpiece", "word", "character", "byte", "split"] | None = None
    path: str | None = None
    vocab_size: Annotated[int, Field(ge=8)] | None = None
    joint: bool | None = None


class ModelSection(Section):
    """The model: a preset or a spec file, and changes to the preset; None keeps its value."""

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


class Lora(Section):
    """Low-rank adaptation (LoRA) of an initial model, whose own weights are frozen."""

    rank: Count
    alpha: Positive | None = None
    dropout: Fraction = 0.0
    targets: Annotated[tuple[str, ...], Field(strict=False)] | None = None


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
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.98)
    eps: Positive = 1e-9
    schedule: Literal["paper", "inverse-sqrt", "cosine", "linear", "wsd", "plateau", "constant"] = "inverse-sqrt"
    warmup: CountOrZero | Share | None = None
    label_smoothing: Fraction = 0.0
    clip: Positive | None = None
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    activation_checkpointing: bool = False
    device: str = "auto"
    threads: Count | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    validate_every: Count | Share = 500
    bleu_sentences: CountOrZero | None = None
    save_every: Count | None = None
    keep: Count = 3
    snapshots: CountOrZero = 10
    snapshot_megabytes: Count = 1000
    average: Annotated[int, Field(ge=2)] | None = None
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    early_stop: EarlyStop | None = None
    tensorboard: bool = False


class RunFile(Section):
    """A run file."""

    task: Task
    data: Data
    tokenizer: TokenizerSection = TokenizerSection()
    model: ModelSection = ModelSection()
    lora: Lora | None = None
    train: Train


SECTIONS: dict[str, type[Section]] = {
    "task": Task,
    "data": Data,
    "tokenizer": TokenizerSection,
    "model": ModelSection,
    "lora": Lora,
    "train": Train,
}
