"""What the families of decoders refuse in place of computing something else, and what they take for granted."""

from __future__ import annotations

from typing import Any

import pytest

from clearhead import spec
from clearhead.base.errors import InputError
from clearhead.checkpoints.hf import registry
from clearhead.checkpoints.hf.mapping import config as configs


def model_of(config: dict[str, Any]) -> spec.Model:
    """Read a config as loading does, without any tensors."""
    record = registry.find_family(config)
    reading = configs.parse(record, config)
    if reading.faults:
        raise InputError("\n".join(reading.faults))
    return record.spec_of(reading.values, record.variants[0])


def attention_of(model: spec.Model, layer: int) -> spec.Attention:
    assert model.decoder is not None
    function = model.decoder.layers[layer].steps[0].branches[0].function
    assert isinstance(function, spec.Attention)
    return function


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mpt", "attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max"),
        ({"model_type": "mpt", "attn_config": {"rope": True}}, "no key attn_config.rope"),
        ({"model_type": "mpt", "no_bias": False}, "biases are not supported"),
        ({"model_type": "falcon", "new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ({"model_type": "falcon", "num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ({"model_type": "falcon", "multi_query": False, "num_kv_heads": 1}, "num_kv_heads"),
        ({"model_type": "bloom", "apply_residual_connection_post_layernorm": True}, "normed stream"),
        ({"model_type": "gpt_neo", "num_layers": 3}, "attention_types"),
        ({"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}}, "longrope only"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}},
            "expected 'full_attention' or 'sliding_attention', got 'rope_",
        ),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "a soft cap on the scores"),
        (
            {"model_type": "olmo3", "rope_parameters": {"rope_theta": 7.0}},
            "expected 'full_attention' or 'sliding_attention', got 'rope_",
        ),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router input jitter"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "each of 36 layers"),
        ({"model_type": "stablelm", "head_dim": 7}, "head_dim"),
        ({"model_type": "opt", "hidden_size": 22, "word_embed_proj_dim": 14}, "OPT-350m alone"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_what_would_be_computed_otherwise_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model_of(config)


def test_an_older_theta_is_of_the_full_layers_alone() -> None:
    model = model_of({"model_type": "olmo3", "rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}})
    assert attention_of(model, 3).position == spec.Rotary(theta=7.0, scaling=spec.LinearScaling(factor=3.0))
    assert attention_of(model, 0).position == spec.Rotary(theta=500000.0)


def test_rotation_is_stretched_where_a_config_is_silent_about_it() -> None:
    silent, plain = ({"model_type": "gpt_oss", **more} for more in ({}, {"rope_parameters": {}}))
    position = attention_of(model_of(silent), 0).position
    assert position is not None and isinstance(position.scaling, spec.YarnScaling)
    assert (position.scaling.factor, position.scaling.truncate) == (32.0, False)
    assert attention_of(model_of(plain), 0).position == spec.Rotary(theta=150000.0)
