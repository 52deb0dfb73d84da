"""Encoders that get a decoder, decoders that become encoders, and new heads."""

from __future__ import annotations

import pytest
import torch

from clearhead import spec
from clearhead.apps.surgery import replace_head, to_encoder, to_encoder_decoder
from clearhead.base.errors import InputError
from clearhead.core import Transformer, build
from clearhead.spec.presets.task_heads import label_head, token_head
from tests.apps.surgery.models import FAMILIES, build_model, family, same_run
from tests.laws.hf_parts import HF_PARTS
from tests.laws.tiny import MODELS, difference, tiny, with_mask

ENCODERS = [name for name in MODELS if name.startswith("encoder/")]
ENCODERS += ["disentangled", "disentangled, own projections", "projection after the norm"]
DECODERS = [name for name in MODELS if name.startswith("decoder/")]
DECODERS += ["own buckets", "disentangled, buckets", "own slopes", "sink", "shared layers"]


def without_memory(module: Transformer) -> Transformer:
    """Set the output of all cross-attention to zero."""
    with torch.no_grad():
        for path, node in spec.walk(module.spec):
            if isinstance(node, spec.Attention) and node.source == "memory":
                module.get_submodule(path).out.weight.zero_()
                if node.bias.out:
                    module.get_submodule(path).out.bias.zero_()
    return module


def check_decoder(module: Transformer) -> Transformer:
    edited = to_encoder_decoder(module)
    ids = torch.randint(module.num_source_ids, (2, 7))
    with torch.no_grad():
        assert torch.equal(edited.model.encode(ids).memory, module(ids).hidden)
        logits = edited.model(ids, ids).logits
    assert logits.shape == (2, 7, module.num_source_ids)
    assert edited.report.new and not edited.report.changed
    memory = [address for address in edited.report.new if not address.startswith("head.")]
    assert all(edited.model.spec.decoder and address.startswith("decoder.layers.") for address in memory)
    assert set(module.state_dict()) <= {*edited.report.copied.values(), *edited.report.dropped}
    assert not [address for address in edited.report.dropped if not address.startswith("head.")]
    return edited.model


@pytest.mark.parametrize("name", ENCODERS)
def test_the_memory_is_what_the_encoder_gave(name: str) -> None:
    check_decoder(build_model(name))


@pytest.mark.parametrize("name", [n for n in ENCODERS if "pre-grouped" in n])
def test_the_decoder_is_the_encoder_under_a_causal_mask(name: str) -> None:
    """With norms inside the branches, cross-attention that adds nothing changes nothing."""
    module = build_model(name)
    edited = without_memory(to_encoder_decoder(module).model)
    causal = build(with_mask(module.spec, spec.Causal(), "encoder")).eval()
    causal.load_state_dict(module.state_dict())
    ids = torch.randint(module.num_source_ids, (2, 7))
    with torch.no_grad():
        assert difference(edited(ids, ids).hidden, causal(ids).hidden) <= 1e-6
        assert difference(edited(ids, ids).hidden, module(ids).hidden) > 1e-4


def test_families_of_encoders() -> None:
    for case in FAMILIES.values():
        module = family(case)
        if module.decoder is None:
            check_decoder(module)


def test_the_head_that_scores_words_stays() -> None:
    module = build_model("encoder/post/learned")
    edited = to_encoder_decoder(module)
    assert edited.model.spec.head == module.spec.head
    labels = replace_head(module, token_head(5))
    assert all(address.startswith("head.") for address in labels.report.new)
    assert to_encoder_decoder(labels.model).model.spec.head.layers[-1].weight.path == "encoder.embedding.table"


def causal_again(module: Transformer) -> Transformer:
    """Return the model with the causal mask of a decoder."""
    text = module.spec.to_json().replace('"kind": "full"', '"kind": "causal"')
    again = build(spec.Model.from_json(text)).eval()
    again.load_state_dict(module.state_dict())
    return again


def check_encoder(module: Transformer) -> None:
    edited = to_encoder(module, head=module.spec.head)
    assert edited.model.decoder is None and not edited.report.new and not edited.report.dropped
    output, again, expected = (same_run(model).hidden for model in (edited.model, causal_again(edited.model), module))
    # Under the mask that it had the new model is the old one; without it, tokens see more.
    assert difference(again, expected) <= 1e-6
    assert difference(output, expected) > 1e-4
    assert not (set(to_encoder(module).model.state_dict()) - {a for a in edited.model.state_dict() if "head." not in a})


@pytest.mark.parametrize("name", DECODERS)
def test_under_a_causal_mask_the_encoder_is_the_decoder(name: str) -> None:
    check_encoder(build_model(name))


def test_families_of_decoders() -> None:
    for name in ("gpt2", "llama", "falcon", "gptj", "bloom"):
        check_encoder(family(FAMILIES[name]))


def test_windows_open_on_both_sides() -> None:
    model = to_encoder(family(FAMILIES["mistral"])).model.spec
    masks = {node for _, node in spec.walk(model) if isinstance(node, spec.Window | spec.Causal | spec.Full)}
    assert not any(isinstance(mask, spec.Causal) for mask in masks)
    assert all(mask.before == mask.after for mask in masks if isinstance(mask, spec.Window))


def test_of_two_stacks_the_encoder_stays() -> None:
    module = build_model("encoder-decoder/post/buckets")
    edited = to_encoder(module)
    ids = torch.randint(module.num_source_ids, (2, 7))
    with torch.no_grad():
        assert torch.equal(edited.model(ids).hidden, module.encode(ids).memory)
    assert all(address.startswith(("decoder.", "head.")) for address in edited.report.dropped)


def test_parts_of_a_head_stay_in_their_places() -> None:
    module = tiny("encoder/post/learned")
    three = replace_head(module, label_head(14, 3, pool="first")).model
    five = replace_head(three, label_head(14, 5, pool="first"))
    assert torch.equal(five.model.head.layers[1].weight, three.head.layers[1].weight)
    assert set(five.report.new) == {"head.layers.3.weight", "head.layers.3.bias"} == set(five.report.dropped)
    assert replace_head(three, None).model.head is None


@pytest.mark.parametrize(
    ("operation", "name", "words"),
    [
        (to_encoder_decoder, "decoder/post/alibi", "has a decoder already"),
        (to_encoder, "encoder/post/alibi", "is an encoder already"),
        (to_encoder, "rounded alibi", "only a decoder can have it"),
    ],
)
def test_what_cannot_be_turned(operation: object, name: str, words: str) -> None:
    module = build_model(name) if name in HF_PARTS else tiny(name)
    with pytest.raises(InputError, match=words):
        operation(module)


def test_a_head_that_does_not_fit() -> None:
    with pytest.raises(InputError, match=r"no table at 'decoder\.embedding\.table'"):
        layers = (spec.Linear(size=29, weight=spec.Reference(path="decoder.embedding.table")),)
        replace_head(tiny("encoder/post/learned"), spec.Head(layers=layers))
