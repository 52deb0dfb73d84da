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
from clearhead.data.task_tables import DataSection, TaskSection, data_of
from clearhead.spec.base import MOST_LAYERS
from clearhead.spec.tasks.registry import kinds

SUBWORD_KINDS = ("bpe", "byte-bpe", "unigram", "wordpiece")

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
CountOrZero = Annotated[int, Field(ge=0)]
Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]


class TokenizerSection(Section):
    """The tokenizer: trained for the run (kind) or loaded from a file or folder (path)."""

    #: What a token is: pieces of words (bpe, byte-bpe, unigram, wordpiece), words, characters, bytes, or, with split,
    #: what the spaces of an already segmented text divide.
    kind: Literal["bpe", "byte-bpe", "unigram", "wordpiece", "word", "character", "byte", "split"] | None = None
    #: An existing tokenizer in place of a trained one: a tokenizer.json, or a folder with one.
    path: str | None = None
    #: How many tokens a trained tokenizer has at most, special ones included; byte has as many as there are bytes.
    vocab_size: Annotated[int, Field(ge=8)] | None = None
    #: Whether source and target share one tokenizer, so that they can share one table.
    joint: bool | None = None


_OWN = Field(description='a table of an own part with its kind, such as { kind = "gated_recurrence" }')
OwnPart = Annotated[dict[str, Any] | None, _OWN]


class ModelSection(Section):
    """The model: a preset or a spec file, and changes to the preset; None keeps its value.

    Own parts, from the file `parts` or an installed package: `mixer` stands in place of each self-attention, `network`
    of each feed-forward network, `own_norm` of each norm in the layers and after them, `own_position` of the positions
    of an embedding; `score_step` and `weight_step` are steps of each self-attention.
    """

    #: Which stacks there are; a task allows some of them.
    family: Literal["encoder", "decoder", "encoder-decoder"] | None = None
    #: The named model that the other keys change.
    preset: str | None = None
    #: A spec.json that describes the whole model; no other key but family and parts goes with it.
    spec: str | None = None
    #: Layers of each stack.
    layers: Layers | None = None
    #: Layers of the encoder of a model with two stacks, where they differ from `layers`.
    encoder_layers: Layers | None = None
    #: Layers of the decoder of a model with two stacks, where they differ from `layers`.
    decoder_layers: Layers | None = None
    #: Size of the residual stream: numbers for each token between the layers.
    width: Count | None = None
    #: Heads of each attention; they divide the width unless `head_size` is given.
    heads: Count | None = None
    #: Heads of keys and values, each shared by several query heads (grouped-query attention); without it as many as
    #: `heads`.
    kv_heads: Count | None = None
    #: Numbers of one head; without it width / heads.
    head_size: Count | None = None
    #: Size of the inner layer of a feed-forward network; without it 4 times the width.
    feedforward: Count | None = None
    #: The function in the feed-forward networks.
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] | None = None
    #: Whether a feed-forward network has a gate, a third matrix (GLU).
    gated: bool | None = None
    #: LayerNorm, or RMSNorm, which does not subtract the mean.
    norm: Literal["layer", "rms"] | None = None
    #: Whether a norm stands on the stream behind each branch (post) or inside the branch, in front of its function
    #: (pre).
    norm_place: Literal["post", "pre"] | None = None
    #: How the model knows the order of the tokens: added to the embedding (sinusoidal, learned), turned into queries
    #: and keys (rotary), or added to the scores (alibi, buckets).
    positions: Literal["sinusoidal", "learned", "rotary", "alibi", "buckets"] | None = None
    #: Rows of learned positions, and so the longest text in tokens.
    max_positions: Count | None = None
    #: Share of numbers that are set to 0 in training, at the end of every branch and of the embedding.
    dropout: Fraction | None = None
    #: The same for attention weights.
    attention_dropout: Fraction | None = None
    #: The same for the inner layer of feed-forward networks.
    activation_dropout: Fraction | None = None
    #: How many tokens back, and in an encoder ahead, self-attention sees; without it all that its mask allows.
    window: Count | None = None
    #: Whether queries and keys are normed before their product.
    qk_norm: bool | None = None
    #: Whether linear maps and layer norms have a bias.
    bias: bool | None = None
    #: Which tables are one: those of both embeddings and the output (all), those of the decoder and the output, or
    #: none.
    tie: Literal["all", "decoder", "none"] | None = None
    #: How fresh weights are drawn.
    initialization: Literal["xavier", "normal"] | None = None
    #: A Python file with own parts, which the keys below name; a relative path begins in the folder of the run file.
    parts: str | None = None
    #: An own part in place of each self-attention.
    mixer: OwnPart = None
    #: An own part in place of each feed-forward network.
    network: OwnPart = None
    #: An own part in place of each norm in the layers and behind them.
    own_norm: OwnPart = None
    #: An own part in place of the positions of an embedding.
    own_position: OwnPart = None
    #: An own part that changes the scores of each self-attention before the mask.
    score_step: OwnPart = None
    #: An own part in place of the softmax of each self-attention.
    weight_step: OwnPart = None


class Lora(Section):
    """Low-rank adaptation (LoRA) of an initial model, whose own weights are frozen."""

    #: Rank of the two matrices whose product is added to each adapted one.
    rank: Count
    #: Their product is multiplied by alpha / rank; without it by 2.
    alpha: Positive | None = None
    #: Share of their inputs that is set to 0 in training.
    dropout: Fraction = 0.0
    #: Addresses, or patterns of them, of the matrices that are adapted; without it those of the attention.
    targets: Annotated[tuple[str, ...], Field(strict=False)] | None = Field(
        default=None, description='a list of addresses, such as ["**.query", "**.value"]'
    )


class EarlyStop(Section):
    """Stop when the metric has not improved for `patience` validations."""

    #: What must improve: the validation loss, BLEU, or the task's own score; it also decides which checkpoint is best.
    metric: Literal["loss", "bleu", "score"] = "loss"
    #: Validations in a row without a better one after which training ends.
    patience: Count = 10


class Train(Section):
    """Length, optimizer, validation and checkpoints.

    `warmup` and `validate_every` are steps or a share of all; `seconds` ends a run of `steps` or `epochs` early. A run
    of `steps` that takes much less than `planned_minutes` says so. `snapshots` are the weights alone of so many steps,
    spaced like a logarithm: fewer where they are too large.
    """

    #: The run directory, which training makes.
    run: Annotated[str, Field(min_length=1)]
    #: Optimizer steps of the run.
    steps: Count | None = None
    #: Passes over the training data, in place of `steps`.
    epochs: Positive | None = None
    #: Ends the run after this time, whatever `steps` or `epochs` say; schedules still count steps.
    seconds: Positive | None = None
    #: What `clearhead new` planned; a run that takes much less says how to make it longer.
    planned_minutes: Positive | None = None
    #: The most tokens of a batch, padding included, over all processes and before accumulation.
    batch_tokens: Count = 4096
    #: Batches whose gradients are summed for one step.
    accumulate: Count = 1
    #: The rule of an update; muon makes updates of matrices orthogonal.
    optimizer: Literal["adam", "adamw", "muon"] = "adamw"
    #: The highest rate; for the schedule paper a factor of its formula.
    learning_rate: Positive | None = None
    #: Share of each matrix, times the learning rate, that is taken away at each step (adam: added to its gradient).
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    #: How slowly the averages of gradients and of their squares follow; closer to 1 is slower.
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = Field(
        default=(0.9, 0.98), description="a list of 2 numbers, each at least 0 and below 1"
    )
    #: Added to the root of the averaged squares, against a division by 0.
    eps: Positive = 1e-9
    #: How the rate goes on after the warm-up: down to 0 along a curve or a line (cosine, linear), constant and then
    #: down (wsd), with one over the root of the steps (inverse-sqrt, paper), halved where the validation loss stays
    #: (plateau), or constant.
    schedule: Literal["paper", "inverse-sqrt", "cosine", "linear", "wsd", "plateau", "constant"] = "inverse-sqrt"
    #: Steps over which the rate rises from 0, or their share of all steps.
    warmup: CountOrZero | Share | None = Field(
        default=None, description="a number of steps from 0 on, or a share of all steps such as 0.1"
    )
    #: Share of the probability of each right token that is spread over all others.
    label_smoothing: Fraction = 0.0
    #: The largest norm of all gradients together; larger ones are scaled down to it.
    clip: Positive | None = None
    #: Of products in training; auto takes the fastest that is safe on this processor.
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    #: How several processes share the work: copies of the model (ddp), or parts of its weights (fsdp); auto takes what
    #: fits.
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    #: Whether activations of a layer are computed again in the backward pass: less memory, more time.
    activation_checkpointing: bool = False
    #: Auto, cpu, cuda, cuda:N or mps.
    device: str = "auto"
    #: Processor threads; without it what PyTorch chooses.
    threads: Count | None = None
    #: Of weights, order of the data and dropout; the same seed gives the same run.
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    #: Steps between two validations, or their share of all steps; a validation also saves a checkpoint.
    validate_every: Count | Share = Field(
        default=500, description="a number of steps from 1 on, or a share of all steps such as 0.1"
    )
    #: Validation pairs that are translated for BLEU at each validation; 0: none.
    bleu_sentences: CountOrZero | None = None
    #: Steps between two checkpoints beside those of validations.
    save_every: Count | None = None
    #: How many of the last checkpoints stay, beside the best one.
    keep: Count = 3
    #: How many times the weights alone are kept, at steps spaced like a logarithm, for `clearhead view --checkpoints`;
    #: 0: none.
    snapshots: CountOrZero = 10
    #: The most that all snapshots take together; of a large model there are fewer.
    snapshot_megabytes: Count = 1000
    #: How many of the last validated weights are averaged at the end, as RUN@averaged.
    average: Annotated[int, Field(ge=2)] | None = None
    #: Decay of a moving average of the weights, which is validated and used in their place; closer to 1 is slower.
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    #: A table that ends training when nothing improves.
    early_stop: EarlyStop | None = None
    #: Where the curves go too, beside `metrics.jsonl`; each needs the extra of its name.
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
    valid = _names(data.forms, can_be_share=True)
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
