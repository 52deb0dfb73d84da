"""From the [model] table of a run file to the spec of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from clearhead.errors import InputError, nearest
from clearhead.presets.hyperparameters import Hyperparameters, build_spec
from clearhead.presets.named import PRESETS
from clearhead.presets.task_heads import with_head
from clearhead.spec import Attention, Branch, Embedding, FeedForward, Head, Model, Node
from clearhead.training.runfile.sections import ModelSection

DEFAULT_PRESET = "transformer"


def resolve_spec(
    section: ModelSection,
    *,
    kind: str,
    source_vocab: int,
    target_vocab: int,
    joint: bool,
    head: Head | None = None,
    prefix: bool = False,
) -> Model:
    """Return the spec that a [model] table means for vocabularies of these sizes.

    Args:
        section: the checked table.
        kind: the task, for the messages.
        source_vocab: rows of the source vocabulary.
        target_vocab: rows of the target vocabulary.
        joint: whether both sides have one vocabulary, so that their tables can be shared.
        head: what turns states into outputs; None: scores of the vocabulary.
        prefix: whether a model with only a decoder shows the prefix of a text to all of it.

    Raises:
        InputError: every size that is impossible, or does not fit the vocabularies.
    """
    if section.spec is not None:
        path = Path(section.spec)
        model = Model.from_file(path)
        if head is not None:
            return with_head(model, head)
        if model.head is None:
            raise InputError(f"{path}: the task '{kind}' needs a spec with a head")
        return model
    hparams = _hparams(section, joint)
    if prefix and hparams.family == "decoder":
        hparams = replace(hparams, prefix=True)
    return build_spec(hparams, source_vocab=source_vocab, target_vocab=target_vocab, head=head)


def _hparams(section: ModelSection, joint: bool) -> Hyperparameters:
    """Put what the table gives over the preset's values."""
    preset = section.preset or DEFAULT_PRESET
    if preset not in PRESETS:
        raise InputError(f"there is no preset '{preset}'{nearest(preset, PRESETS)}; there are {', '.join(PRESETS)}")
    hparams = PRESETS[preset]
    given = section.model_dump(exclude={"preset", "spec"}, exclude_none=True)
    if not joint:
        given = {"tie": "decoder", **given}
    hparams = replace(hparams, **given)
    if section.max_positions is not None and hparams.positions != "learned":
        raise InputError(
            f"max_positions has no effect with {hparams.positions} positions, which have no limit; remove it, "
            "or set positions = 'learned'"
        )
    return hparams


def with_dropout(model: Model, section: ModelSection) -> Model:
    """Return a spec with the dropout that a [model] table gives beside [task] init; the rest stays.

    Args:
        model: of the start.
        section: the checked table.
    """
    found = _with_dropout(model, section)
    assert isinstance(found, Model)
    return found


def _with_dropout(node: Any, section: ModelSection) -> Any:
    if isinstance(node, tuple):
        return tuple(_with_dropout(one, section) for one in node)
    if not isinstance(node, Node):
        return node
    changes = {name: _with_dropout(getattr(node, name), section) for name in type(node).model_fields}
    if isinstance(node, Branch | Embedding) and section.dropout is not None:
        changes["dropout"] = section.dropout
    if isinstance(node, Attention) and section.attention_dropout is not None:
        changes["dropout"] = section.attention_dropout
    if isinstance(node, FeedForward) and section.activation_dropout is not None:
        changes["dropout"] = section.activation_dropout
    return node.model_copy(update=changes)
