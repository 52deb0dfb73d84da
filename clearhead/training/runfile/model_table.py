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
        section: the table.
        kind: the task, for the messages.
        source_vocab: size of the source vocabulary.
        target_vocab: size of the target vocabulary.
        joint: whether both sides have one vocabulary, so that their tables can be shared.
        head: None: a vocabulary head.

    Raises:
        InputError: sizes are impossible, or do not fit the vocabularies.
    """
    if section.spec is not None:
        path = Path(section.spec)
        model = Model.from_file(path)
        if head is not None:
            return try_spec(with_head(model, head))
        if model.head is None:
            raise InputError(f"{path}: the task '{kind}' needs a spec with a head")
        return try_spec(model)
    hparams = _hparams(section, joint)
    _refuse_too_large(hparams)
    model = build_spec(hparams, source_vocab=source_vocab, target_vocab=target_vocab, head=head)
    return try_spec(with_extensions(model, section))


def _refuse_too_large(hparams: Hyperparameters) -> None:
    """Refuse a model whose training could not fit into this machine, before anything is built."""
    needed, total = TRAINING_BYTES * least_parameters(hparams), total_memory()
    if needed > total:
        raise InputError(
            f"{hparams.layers:,} layers of width {hparams.width:,} have at least {least_parameters(hparams):,} "
            f"parameters; training takes {TRAINING_BYTES} bytes for each, {human_bytes(needed)}, and this machine has "
            f"{human_bytes(total)} of memory"
        )


def least_parameters(hparams: Hyperparameters) -> int:
    """Return the parameters of the projections in the layers: all but embeddings, norms and biases.

    Args:
        hparams: sizes; absent ones follow from the others as in the spec.
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
    """Put what the table gives over the preset's values."""
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
    """Return a spec whose own parts, if there are any, were tried with few tokens.

    Raises:
        InputError: one does not do what its role needs.
    """
    if next(own_parts(model), None) is not None:
        from clearhead.core.extensions.trial import try_parts  # torch is needed for it

        try_parts(model)
    return model


def with_extensions(model: Model, section: ModelSection) -> Model:
    """Return a spec with the own parts of a [model] table in it.

    Args:
        model: the spec without them.
        section: the table.

    Raises:
        InputError: a part is not there, stands where it has no place, or its values are faulty.
    """
    tables = {key: table for key in EXTENSION_KEYS if (table := getattr(section, key)) is not None}

    def change(path: str, node: Node) -> Node:
        fields = {field: tables[key] for key, field in _extension_fields(node) if key in tables}
        with within(path.rpartition(".")[2]):
            return type(node)(**{**dict(node), **fields}) if fields else node

    return map_nodes(model, change) if tables else model


def _extension_fields(node: Node) -> Iterator[tuple[str, str]]:
    """Yield the keys of a [model] table whose own parts stand in fields of a node, and these fields."""
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
    """Return the dropout of attention weights and inner layers that follows the key `dropout` of a [model] table.

    Args:
        section: the table.
        preset: the values before the table changes them; a dropout that is 0 in them stays 0.
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
        section: the table; `dropout` also replaces the dropout of attention weights and of inner layers where the model
            has one and the table has no key for it.
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
