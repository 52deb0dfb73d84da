"""Methods of `AttentionMaps` about heads use the right output and model, and refuse wrong input clearly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from clearhead.base.errors import InputError
from clearhead.interpret.maps.attention_maps import AttentionMaps
from clearhead.interpret.maps.flow import norm_weighted, rollout
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer
from tests.interpret.maps.test_attention_maps import HEADS, LAYERS, model_of

TEXT, TARGET = "abc de", "fa cb"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer("character", ["abcdefgh .,x_"], vocab_size=40, mask=True)


@pytest.fixture(scope="module")
def translation(tokenizer: Tokenizer) -> AttentionMaps:
    return model_of(tokenizer, "encoder-decoder", "translate").attention(TEXT, TARGET)


@pytest.fixture(scope="module")
def writing(tokenizer: Tokenizer) -> AttentionMaps:
    return model_of(tokenizer, "decoder", "generate").attention(TEXT)


@torch.no_grad()
def logits(maps: AttentionMaps) -> torch.Tensor:
    return maps.module(maps.inputs.source, maps.inputs.target).logits[0]


def test_the_outcome_is_the_last_token_of_the_target(translation: AttentionMaps, writing: AttentionMaps) -> None:
    for maps, read in ((translation, translation.target_tokens), (writing, writing.tokens)):
        outcome = maps.outcome()
        assert (outcome.position, outcome.token) == (len(read) - 1, read[-1])
    assert translation.outcome(len(translation.target_tokens)).token == "</s>", "the end token, by its position"


def test_effects_contributions_and_lens_are_of_the_outcome(translation: AttentionMaps, writing: AttentionMaps) -> None:
    for maps, stacks in ((translation, translation.stacks), (writing, ("decoder.self",))):
        outcome = maps.outcome("a")
        effects = maps.effects("a")
        heads = [(stack, layer, head) for stack in stacks for layer in range(LAYERS) for head in range(HEADS)]
        assert [(effect.stack, effect.layer, effect.head) for effect in effects] == heads
        terms = maps.contributions("a")
        assert sum(term.value for term in terms) == pytest.approx(
            float(logits(maps)[outcome.logits_position, outcome.id]), 1e-4
        )
        lens = maps.lens(top_k=3)
        best = logits(maps).softmax(-1).topk(3)
        assert torch.equal(lens.ids[-1], best.indices) and len(lens.ids) == LAYERS + 1
        assert tuple(lens.target_ids[: len(maps.inputs.labels)].tolist()) == maps.inputs.labels
        keys = maps.key_effects(stacks[-1], layer=1, head=1, of="a")
        assert keys.shape == (len(maps.key_tokens(stacks[-1])),) and keys.abs().max() > 0


def test_flow_is_that_of_the_records(translation: AttentionMaps) -> None:
    records = list(translation.records.values())
    for stack in translation.stacks:
        assert torch.equal(translation.rollout(stack), rollout(records, stack))
        lengths = translation.norm_weighted(stack, layer=2, head=1)
        assert torch.equal(lengths, norm_weighted(translation.record(stack, 2), 1))


def test_a_masked_model_has_effects_on_what_it_fills_in(tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer, "encoder", "fill")
    masked, best = model.attention("ab ___ d"), model.fill(["ab ___ d"])[0][0][0]
    outcome = masked.outcome()
    assert (masked.tokens[outcome.position], outcome.token) == ("<mask>", best.token)
    assert len(masked.effects()) == LAYERS * HEADS
    assert masked.lens(2).stack == "encoder"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda maps: maps.effects(99), "position 99; expected 1 to"),
        (lambda maps: maps.contributions("abc"), "'abc' must be one token"),
        (lambda maps: maps.key_effects("decoder.self", 0, 7), "no head 7"),
        (lambda maps: maps.norm_weighted("decoder.self", 9, 0), "no layer 9"),
        (lambda maps: maps.rollout("decoder.slef"), "did you mean 'decoder.self'"),
        (lambda maps: maps.lens(0), "top_k is 0"),
    ],
)
def test_a_wrong_argument_is_refused(
    writing: AttentionMaps, call: Callable[[AttentionMaps], object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        call(writing)


def test_a_model_that_gives_vectors_is_refused(tokenizer: Tokenizer) -> None:
    maps = model_of(tokenizer, "encoder", "embed").attention(TEXT)
    for call in (maps.effects, maps.contributions, maps.lens):
        with pytest.raises(InputError, match="outputs no probabilities of tokens or labels"):
            call()
