"""Build the spec of a model from the [model] table of a run file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from clearhead.base.errors import InputError, did_you_mean, within
from clearhead.base.machine import total_memory
from clearhead.base.printing import human_bytes
from clearhead.spec import (
    Attention,
    Branch,
    Embedding,
    FeedForward,
    Head,
    Model,
    Node,
    Stack,
    Step,
    map_nodes,
    own_parts,
)
from clearhead.spec.cost import TRAINING_BYTES
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.spec.presets.named import PRESETS
from clearhead.spec.presets.task_heads import with_head
from clearhead.training.runfile.sections import INNER_DROPOUTS, ModelSection

DEFAULT_PRESET = "transformer"
EXTENSION_KEYS: Final = ("mixer", "network", "own_norm", "own_position", "score_step", "weight_step")
_NORMS: Final = ("pre", "post", "out", "final_norm")


def resolve_spec(
    section: ModelSection,
    *,
    kind: str,
    source_vocab: int,
    target_vocab: int,
    joint: bool,
    head: Head | None = None,
) -> Model:
    """Return the spec of a [model] table for vocabularies of these sizes.

    Args:
        section: the [model] table.
        kind: the kind of the task, for messages.
        source_vocab: the size of the source vocabulary.
        target_vocab: the size of the target vocabulary.
        joint: True if both sides share one vocabulary, so that they can share embeddings.
        head: the head of the model. None means a vocabulary head.

    Raises:
        InputError: sizes are impossible, or do not fit the vocabularies.
    """
    if section.spec is not None:
        path = Path(section.spec)
        model = Model.from_file(path)
        if head is not None:
            return try_spec(with_head(model, head))
        if model.head is None:
            raise InputError(f"{path}: the task '{kind}' needs a spec with a head; add one to this file")
        return try_spec(model)
    hparams = _hparams(section, joint)
    _refuse_too_large(hparams)
    model = build_spec(hparams, source_vocab=source_vocab, target_vocab=target_vocab, head=head)
    return try_spec(with_extensions(model, section))


def _refuse_too_large(hparams: Hyperparameters) -> None:
    """Refuse a model whose training exceeds the memory of this machine, before it is built."""
    needed, total = TRAINING_BYTES * least_parameters(hparams), total_memory()
    if needed > total:
        raise InputError(
            f"{hparams.layers:,} layers of width {hparams.width:,} have at least {least_parameters(hparams):,} "
            f"parameters; training takes {TRAINING_BYTES} bytes for each, {human_bytes(needed)}, and this machine has "
            f"{human_bytes(total)} of memory: lower layers or width"
        )


def least_parameters(hparams: Hyperparameters) -> int:
    """Return the number of parameters in the projections of the layers; embeddings, norms and biases do not count.

    Args:
        hparams: the hyperparameters; missing sizes have the defaults of the spec.
    """
    width, heads = hparams.width, hparams.heads
    head_size = hparams.head_size or width // heads
    attention = 2 * width * head_size * (heads + (hparams.kv_heads or heads))
    feedforward = (3 if hparams.gated else 2) * width * (hparams.feedforward or 4 * width)
    count = 0
    if hparams.family != "decoder":
        count += (hparams.encoder_layers or hparams.layers) * (attention + feedforward)
    if hparams.family != "encoder":
        memory = attention if hparams.family == "encoder-decoder" else 0
        count += (hparams.decoder_layers or hparams.layers) * (attention + memory + feedforward)
    return count


def _hparams(section: ModelSection, joint: bool) -> Hyperparameters:
    """Return the hyperparameters of the preset with the changes of the [model] table."""
    preset = section.preset or DEFAULT_PRESET
    if preset not in PRESETS:
        raise InputError(
            f"there is no preset '{preset}'{did_you_mean(preset, PRESETS)}; there are {', '.join(PRESETS)}"
        )
    hparams = PRESETS[preset]
    changes = section.model_dump(exclude={"preset", "spec", "parts", *EXTENSION_KEYS}, exclude_none=True)
    if not joint:
        changes = {"tie": "decoder", **changes}
    changes |= _inner_dropout(section, hparams)
    hparams = replace(hparams, **changes)
    if section.max_positions is not None and hparams.positions != "learned":
        raise InputError(
            f"max_positions has no effect with {hparams.positions} positions, which have no limit; remove it, "
            "or set positions = 'learned'"
        )
    return hparams


def try_spec(model: Model) -> Model:
    """Check the custom modules of a spec by running them on a few tokens, and return the spec unchanged.

    Raises:
        InputError: a custom module does not do what its role needs.
    """
    if next(own_parts(model), None) is not None:
        from clearhead.core.extensions.trial import try_parts  # torch is needed for it

        try_parts(model)
    return model


def with_extensions(model: Model, section: ModelSection) -> Model:
    """Return a spec with the custom modules of a [model] table.

    Args:
        model: the spec without custom modules.
        section: the [model] table.

    Raises:
        InputError: a custom module is missing, is used in a wrong role, or has wrong values.
    """
    tables = {key: table for key in EXTENSION_KEYS if (table := getattr(section, key)) is not None}

    def change(path: str, node: Node) -> Node:
        fields = {field: tables[key] for key, field in _extension_fields(node) if key in tables}
        with within(path.rpartition(".")[2]):
            return type(node)(**{**dict(node), **fields}) if fields else node

    return map_nodes(model, change) if tables else model


def _extension_fields(node: Node) -> Iterator[tuple[str, str]]:
    """Yield the keys of a [model] table that name a custom module for a field of a node, and these fields."""
    if isinstance(node, Branch) and isinstance(node.function, FeedForward):
        yield "network", "function"
    if isinstance(node, Branch) and isinstance(node.function, Attention) and node.function.source == "self":
        yield "mixer", "function"
    if isinstance(node, Branch | Step | Stack):
        yield from (("own_norm", field) for field in _NORMS if getattr(node, field, None) is not None)
    if isinstance(node, Embedding):
        yield "own_position", "position"
    if isinstance(node, Attention) and node.source == "self":
        yield from (("score_step", "score_step"), ("weight_step", "weight_step"))


def _inner_dropout(section: ModelSection, preset: Hyperparameters) -> dict[str, float]:
    """Return the dropout of attention weights and inner layers that follows from `dropout` in a [model] table.

    Args:
        section: the [model] table.
        preset: the hyperparameters of the preset; a dropout of 0 stays 0.
    """
    dropout: float | None = section.dropout
    if dropout is None:
        return {}
    keys = [key for key in INNER_DROPOUTS if getattr(section, key) is None and getattr(preset, key) > 0.0]
    return dict.fromkeys(keys, dropout)


def with_dropout(model: Model, section: ModelSection) -> Model:
    """Return the spec of an initial model with the dropout of a [model] table.

    Args:
        model: the spec of the initial model.
        section: the [model] table. `dropout` also replaces the dropout of attention weights and inner layers, if the
            model has one and the table has no key for it.
    """
    keys = {Attention: section.attention_dropout, FeedForward: section.activation_dropout}

    def change(path: str, node: Node) -> Node:
        if not isinstance(node, Branch | Embedding | Attention | FeedForward):
            return node
        dropout = keys.get(type(node))
        if dropout is None and (node.dropout > 0.0 or isinstance(node, Branch | Embedding)):
            dropout = section.dropout
        return node if dropout is None else node.model_copy(update={"dropout": dropout})

    return map_nodes(model, change)
