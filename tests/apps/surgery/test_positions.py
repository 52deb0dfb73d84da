"""Extended positions: short texts stay the same, and rotations follow the kind of scaling."""

from __future__ import annotations

import pytest
import torch

from clearhead import spec
from clearhead.apps.surgery import resize_positions, scale_rotary
from clearhead.base.errors import InputError
from tests.apps.surgery.models import FAMILIES, build_model, family, same_run
from tests.laws.hf_parts import HF_PARTS
from tests.laws.tiny import MAX_POSITIONS, difference, tiny

LEARNED = [name for name, case in FAMILIES.items() if name in ("bert", "roberta", "gpt2", "opt", "bart", "distilbert")]


def test_repeated_rows_leave_short_sequences_as_they_were() -> None:
    module = build_model("encoder-decoder/post/learned")
    edited = resize_positions(module, 40)
    assert torch.equal(same_run(edited.model).logits, same_run(module).logits)
    assert edited.model.max_positions == 40
    table = edited.model.encoder.embedding.position.weight
    assert torch.equal(table[MAX_POSITIONS : 2 * MAX_POSITIONS], table[:MAX_POSITIONS])
    assert len(edited.report.changed) == 2 and not edited.report.new
    decoder_only = resize_positions(module, 40, stack="decoder").model
    assert decoder_only.encoder.embedding.position.weight.shape[0] == MAX_POSITIONS
    assert decoder_only.decoder.embedding.position.weight.shape[0] == 40


@pytest.mark.parametrize("name", LEARNED)
def test_every_family_with_a_table(name: str) -> None:
    """Rows before the first position, which no token uses, stay in front."""
    module = family(FAMILIES[name])
    edited = resize_positions(module, 61).model
    assert edited.max_positions == 61
    assert torch.equal(same_run(edited).hidden, same_run(module).hidden)
    assert torch.equal(same_run(resize_positions(module, 9).model).hidden, same_run(module).hidden)


def test_interpolated_rows_lie_evenly_between_the_old_ones() -> None:
    module = tiny("encoder/post/learned")
    old = module.encoder.embedding.position.weight
    new = resize_positions(module, 2 * MAX_POSITIONS - 1, by="interpolate").model.encoder.embedding.position.weight
    assert difference(new[::2], old) <= 1e-6
    assert difference(new[1], (old[0] + old[1]) / 2) <= 1e-6


def test_drawn_rows_stand_behind_the_old_ones() -> None:
    module = tiny("encoder/post/learned")
    old = module.encoder.embedding.position.weight
    new = resize_positions(module, 31, by="draw").model.encoder.embedding.position.weight
    assert torch.equal(new[:MAX_POSITIONS], old) and new[MAX_POSITIONS:].std() > 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("decoder/pre-grouped/rotary", "scale_rotary"),
        ("encoder/post/sinusoidal", "computed for any length"),
        ("decoder/post/buckets", "biased by distance"),
        ("disentangled, buckets", "scale_rotary|biased by distance"),
    ],
)
def test_other_positions_have_no_table(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        resize_positions(build_model(name), 40)


def test_a_linear_scaling_halves_every_step() -> None:
    """Positions 0, 2, 4, ... of the new model are 0, 1, 2, ... of the old one."""
    module = build_model("decoder/pre-grouped/rotary")
    edited = scale_rotary(module, spec.LinearScaling(factor=2.0))
    ids = torch.randint(23, (2, 7))
    with torch.no_grad():
        hidden = edited.model(ids, positions=2 * torch.arange(7).expand(2, 7)).hidden
        assert difference(hidden, module(ids).hidden) <= 1e-5
    assert difference(same_run(edited.model).hidden, same_run(module).hidden) > 1e-4
    assert scale_rotary(edited.model, None).model.spec == module.spec
    assert "scaling changed in 2 attentions" in str(edited.report)


def test_the_kind_of_scaling_is_that_of_the_spec() -> None:
    module = build_model("decoder/pre-grouped/rotary")
    for name in HF_PARTS:
        if name.startswith("rotation "):
            wanted = build_model(name)
            scaling = next(node.scaling for _, node in spec.walk(wanted.spec) if isinstance(node, spec.Rotary))
            edited = scale_rotary(module, scaling).model
            assert {node.scaling for _, node in spec.walk(edited.spec) if isinstance(node, spec.Rotary)} == {scaling}


def test_some_layers_turn_otherwise() -> None:
    module = build_model("decoder/pre-grouped/rotary")
    edited = scale_rotary(module, spec.LinearScaling(factor=3.0), theta=500.0, layers="decoder.layers.1").model
    first, second = (node for _, node in spec.walk(edited.spec) if isinstance(node, spec.Rotary))
    assert first.scaling is None and second == spec.Rotary(theta=500.0, scaling=spec.LinearScaling(factor=3.0))


@pytest.mark.parametrize(
    ("name", "call", "words"),
    [
        ("decoder/post/alibi", lambda m: scale_rotary(m, None), "this model has no RoPE"),
        ("decoder/post/rotary", lambda m: scale_rotary(m, None, layers="encoder.*"), "no attention with RoPE matches"),
        (
            "decoder/post/rotary",
            lambda m: scale_rotary(m, spec.LongRopeScaling(short_factor=(1.0,), long_factor=(1.0,), original_length=7)),
            "short_factor needs a number for each of 5",
        ),
        ("encoder/post/learned", lambda m: resize_positions(m, 0), "at least 1 token, got 0"),
    ],
)
def test_what_is_refused(name: str, call: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call(tiny(name))
