"""The longest sequence that a config declares is remembered for computed positions, and written again."""

from __future__ import annotations

import json

import pytest
import transformers

from clearhead import spec
from clearhead.checkpoints.hf import registry
from clearhead.checkpoints.hf.mapping import config as configs
from tests.parity.architectures.harness import Case, all_cases, class_of

CASES = [case for case in all_cases() if not case.is_head]


def their_length(config: transformers.PreTrainedConfig) -> int | None:
    """What transformers calls the longest sequence, by the name of its own class."""
    return getattr(config, "max_position_embeddings", None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_computed_positions_have_the_declared_length(case: Case) -> None:
    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    content = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [class_of(case)]}
    family = registry.find_family(content)
    parsed = configs.parse(family, content)
    assert not parsed.faults
    model_spec = family.spec_of(parsed.values, case.variant)
    is_computed = any(isinstance(node, spec.Rotary | spec.Sinusoidal) for _, node in spec.walk(model_spec))
    has_table = any(isinstance(node, spec.Learned) for _, node in spec.walk(model_spec))
    if case.model_type == "t5gemma":
        expected = min(config.encoder.max_position_embeddings, config.decoder.max_position_embeddings)
    else:
        expected = their_length(config)
    assert model_spec.declared_length == (expected if is_computed else None)
    assert (model_spec.position_limit is None) == (not is_computed and not has_table)
    written = configs.to_config(family, case.variant, model_spec)
    again = configs.parse(family, written)
    assert family.spec_of(again.values, case.variant).declared_length == model_spec.declared_length
