"""Initialization: bounds, standard deviations, zeros and ones, and the scale of a branch's output projection."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from clearhead import spec
from clearhead.core import MultiHeadAttention, build
from clearhead.spec.presets.hyperparameters import Hyperparameters, build_spec

HPARAMS = Hyperparameters(
    encoder_layers=2, decoder_layers=3, width=62, heads=2, feedforward=101, segments=7, positions="buckets"
)


def build_module(initialization: str) -> nn.Module:
    return build(build_spec(replace(HPARAMS, initialization=initialization), source_vocab=499, target_vocab=499))


def test_xavier_fills_its_bounds_and_embeddings_have_the_deviation_of_the_paper() -> None:
    module = build_module("xavier")
    for name, submodule in module.named_modules():
        if isinstance(submodule, nn.Linear):
            bound = math.sqrt(6 / (submodule.in_features + submodule.out_features))
            assert 0.97 * bound < submodule.weight.abs().max() <= bound, name
            assert submodule.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name
            assert not submodule.bias.any()
    assert module.encoder.embedding.table.weight.std().item() == pytest.approx(62**-0.5, rel=0.02)
    assert module.encoder.embedding.segments.weight.std().item() == pytest.approx(62**-0.5, rel=0.2)


def test_normal_scales_output_projections_by_the_number_of_branches() -> None:
    module = build_module("normal")
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            assert torch.equal(parameter, torch.full_like(parameter, float(".out.weight" in name))), name
        elif parameter.numel() > 1000:
            branches = {"encoder": 2 * 2, "decoder": 3 * 3}[name.split(".")[0]]
            ends = name.endswith(("function.out.weight", "function.down.weight"))
            expected = 0.02 / math.sqrt(branches) if ends else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.06), name


def test_branches_can_stay_unscaled() -> None:
    model = build_spec(HPARAMS, source_vocab=499, target_vocab=499)
    model = model.model_copy(update={"initialization": spec.Normal(std=0.3, scale_branches=False)})
    weight = build(model).decoder.layers[0].steps[2].branches[0].function.down.weight
    assert weight.std().item() == pytest.approx(0.3, rel=0.05)


def test_the_seed_determines_the_weights() -> None:
    states = []
    for seed in (3, 3, 5):
        torch.manual_seed(seed)
        states.append(torch.cat([p.flatten() for p in build_module("xavier").parameters() if p.dim() > 1]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_standalone_attention_initializes_every_weight() -> None:
    """Including the table of relative position buckets, which was once left uninitialized."""
    torch.manual_seed(0)
    draws = []
    for _ in range(2):
        torch.manual_seed(5)
        attention = MultiHeadAttention(62, 2, position=spec.RelativeBuckets(num_heads=2, count=100, bidirectional=True))
        draws.append(attention.score_bias.weight.detach().clone())
        bound = math.sqrt(6 / 124)
        assert 0.97 * bound < attention.query.weight.abs().max() <= bound
    assert torch.equal(draws[0], draws[1])
    assert draws[0].std().item() == pytest.approx(2**-0.5, rel=0.2)


def test_nothing_is_initialized_on_the_meta_device() -> None:
    before = torch.get_rng_state()
    module = build(build_spec(HPARAMS, source_vocab=499, target_vocab=499), device="meta")
    assert all(parameter.device.type == "meta" for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), before)
