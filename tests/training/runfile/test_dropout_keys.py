"""The key `dropout` of a [model] table: it sets every dropout that the preset or the initial model has."""

from __future__ import annotations

from typing import Any

import pytest

from clearhead.spec import Attention, Branch, Embedding, FeedForward, Model, Node
from clearhead.spec.presets.hyperparameters import build_spec
from clearhead.spec.presets.named import PRESETS
from clearhead.spec.traversal import walk
from clearhead.training.runfile.model_table import resolve_spec, with_dropout
from clearhead.training.runfile.sections import ModelSection


def rates(model: Model) -> dict[type[Node], set[float]]:
    """Return the dropouts of a model by type of node."""
    kinds = (Embedding, Branch, Attention, FeedForward)
    return {kind: {node.dropout for _, node in walk(model) if type(node) is kind} for kind in kinds}


def resolve(preset: str, *, is_initial: bool, **keys: Any) -> Model:
    if is_initial:
        initial = build_spec(PRESETS[preset], source_vocab=7, target_vocab=7)
        return with_dropout(initial, ModelSection(**keys))
    section = ModelSection(preset=preset, **keys)
    return resolve_spec(section, kind="translate", source_vocab=7, target_vocab=7, joint=True)


@pytest.mark.parametrize("is_initial", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_dropout_sets_every_dropout_that_there_is(preset: str, is_initial: bool) -> None:
    before = rates(resolve(preset, is_initial=is_initial))
    assert rates(resolve(preset, is_initial=is_initial, dropout=0.0)) == {kind: {0.0} for kind in before}
    after = rates(resolve(preset, is_initial=is_initial, dropout=0.37))
    for kind, now in after.items():
        has_any = kind in (Embedding, Branch) or before[kind] != {0.0}
        assert now == ({0.37} if has_any else {0.0})
    inner = {"attention_dropout": Attention, "activation_dropout": FeedForward}
    for key, kind in inner.items():
        named = rates(resolve(preset, is_initial=is_initial, dropout=0.37, **{key: 0.11}))
        assert named == after | {kind: {0.11}}
