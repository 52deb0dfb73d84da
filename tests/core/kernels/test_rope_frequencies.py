"""RoPE scaling: the frequencies equal those of transformers bit for bit, with one length per sequence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from clearhead import spec
from clearhead.core.kernels.positions import rotary_angles, rotary_frequencies, sequence_lengths

SIZE, ORIGINAL, THETA = 22, 61, 50000.0
SHORT, LONG = [1.0 + 0.1 * i for i in range(11)], [2.0 + 0.3 * i for i in range(11)]
LENGTHS = {"original_max_position_embeddings": ORIGINAL}
LONG_MAGNITUDE = math.sqrt(1 + math.log(4.0) / math.log(ORIGINAL))
CASES: list[tuple[dict[str, Any], object]] = [
    ({"rope_type": "linear", "factor": 3.7}, spec.LinearScaling(factor=3.7)),
    (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LENGTHS},
        spec.BandScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=ORIGINAL),
    ),
    (
        {"rope_type": "yarn", "factor": 4.0, **LENGTHS},
        spec.YarnScaling(factor=4.0, original_length=ORIGINAL, magnitude=0.1 * math.log(4.0) + 1.0),
    ),
    (
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 7.0, "beta_slow": 0.5, "truncate": False, **LENGTHS},
        spec.YarnScaling(
            factor=4.0, original_length=ORIGINAL, beta_fast=7.0, beta_slow=0.5, truncate=False,
            magnitude=0.1 * math.log(4.0) + 1.0,
        ),
    ),
    ({"rope_type": "dynamic", "factor": 2.5}, spec.DynamicScaling(factor=2.5, original_length=ORIGINAL)),
    (
        {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 4.0, **LENGTHS},
        spec.LongRopeScaling(
            short_factor=tuple(SHORT), long_factor=tuple(LONG), original_length=ORIGINAL, magnitude=LONG_MAGNITUDE
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize("length", [17, ORIGINAL, ORIGINAL + 1, 4 * ORIGINAL])
@pytest.mark.parametrize(("parameters", "scaling"), CASES, ids=lambda case: getattr(case, "kind", ""))
def test_frequencies_are_bit_for_bit_those_of_transformers(
    parameters: dict[str, Any], scaling: Any, length: int
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(hidden_size=3 * SIZE, num_attention_heads=3, max_position_embeddings=ORIGINAL)
    if parameters["rope_type"] != "dynamic":
        config.max_position_embeddings = 4 * ORIGINAL
    config.rope_parameters = {"rope_theta": THETA, **parameters}
    function = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    expected, magnitude = function(config, torch.device("cpu"), seq_len=torch.tensor(length))
    rotary = spec.Rotary(theta=THETA, scaling=scaling)
    lengths = torch.tensor([[length, 3]])
    actual, found_magnitude = rotary_frequencies(rotary, SIZE, lengths, torch.device("cpu"))
    actual = actual if actual.dim() == 1 else actual[0, 0]
    if scaling.kind == "dynamic_scaling" and length <= ORIGINAL:
        torch.testing.assert_close(actual, expected, atol=0, rtol=1e-6)  # they pass through a power of almost one
    else:
        assert torch.equal(actual, expected)
    assert found_magnitude == pytest.approx(magnitude, rel=1e-12)


def test_the_magnitude_multiplies_cosine_and_sine() -> None:
    position = torch.arange(5)[None]
    scaling = spec.YarnScaling(factor=4.0, original_length=7, magnitude=1.3)
    plain = scaling.model_copy(update={"magnitude": 1.0})
    actual = rotary_angles(position, spec.Rotary(scaling=scaling), SIZE, None)
    for angles, other in zip(actual, rotary_angles(position, spec.Rotary(scaling=plain), SIZE, None), strict=True):
        torch.testing.assert_close(angles, 1.3 * other)


def test_lengths_are_those_of_the_tokens_sequences() -> None:
    position = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]])
    assert sequence_lengths(position, None).tolist() == [[3] * 6, [4] * 6]
    documents = torch.tensor([[7, 7, 7, 2, 2, 7], [5, 5, 6, 6, 6, 6]])
    assert sequence_lengths(position, documents).tolist() == [[3, 3, 3, 2, 2, 1], [1, 1, 4, 4, 4, 4]]


def test_each_row_of_a_batch_is_scaled_by_its_own_length() -> None:
    rotary = spec.Rotary(scaling=spec.DynamicScaling(factor=3.0, original_length=5))
    position = torch.arange(7)[None].expand(2, 7)
    cos, _ = rotary_angles(position, rotary, 6, torch.tensor([[5], [7]]).expand(2, 7))
    plain, _ = rotary_angles(position, spec.Rotary(), 6, None)
    assert torch.equal(cos[0], plain[0])
    assert (cos[1] - plain[1]).abs().max() > 1e-2
