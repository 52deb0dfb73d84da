"""A page has the weights, statistics, contributions, effects and predictions of the maps, at the same positions."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from clearhead import core, spec
from clearhead.base.errors import InputError
from clearhead.interpret.maps.attention_maps import AttentionMaps
from clearhead.interpret.maps.page import SampleOptions, explorer_page, run_sample, token_row
from clearhead.interpret.view.explorer.data import LayerAttention, Sample
from clearhead.model.facade import Model
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer
from tests.interpret.maps.test_attention_maps import HEADS, LAYERS, TARGET, TEXT, model_of


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer("character", ["abcdefgh .,x_"], vocab_size=40, mask=True)


@pytest.fixture(scope="module", params=["encoder", "decoder", "encoder-decoder"])
def maps(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> AttentionMaps:
    kind = {"encoder": "fill", "decoder": "generate", "encoder-decoder": "translate"}[request.param]
    model: Model = model_of(tokenizer, request.param, kind)
    return model.attention("a___c" if kind == "fill" else TEXT, TARGET if kind == "translate" else None)


@pytest.fixture(scope="module")
def sample(maps: AttentionMaps) -> Sample:
    return run_sample(maps, "first", SampleOptions(effects=True))


def layers_by_stack(sample: Sample, measure: str) -> dict[tuple[str, int], LayerAttention]:
    return {
        (attention.stack, layer.layer): layer
        for attention in sample.attentions
        if attention.measure.startswith(measure)
        for layer in attention.layers
    }


def test_every_weight_is_that_of_the_maps(maps: AttentionMaps, sample: Sample) -> None:
    layers = layers_by_stack(sample, "attention weight")
    assert {stack for stack, _ in layers} == set(maps.stacks) and len(layers) == LAYERS * len(maps.stacks)
    for (stack, layer), attention in layers.items():
        assert attention.heads == tuple(range(HEADS))
        assert np.array_equal(attention.weights(), maps.weights(stack, layer).numpy())
        assert attention.mask is None or not attention.weights()[:, ~attention.mask].any()


def test_exact_heads_give_the_weights(sample: Sample) -> None:
    for layer in layers_by_stack(sample, "attention weight").values():
        for head, numbers in layer.exact.items():
            scores = torch.from_numpy(numbers.query @ numbers.key.T * numbers.scale)
            if layer.mask is not None:
                scores = scores.masked_fill(~torch.from_numpy(layer.mask), -math.inf)
            assert np.allclose(scores.softmax(-1).numpy(), layer.weights()[head], atol=1e-6)


def test_columns_are_statistics_effects_and_contributions(maps: AttentionMaps, sample: Sample) -> None:
    layers = layers_by_stack(sample, "attention weight")
    for row in maps.heads():
        values = layers[row.stack, row.layer].values
        for name in ("entropy", "previous_token", "alignment"):
            expected = getattr(row, name)
            assert math.isnan(values[name][row.head]) if expected is None else values[name][row.head] == expected
        assert layers[row.stack, row.layer].patterns[row.head] == ", ".join(row.patterns)
    for effect in maps.effects():
        assert layers[effect.stack, effect.layer].values["effect"][effect.head] == pytest.approx(
            effect.change, abs=1e-6
        )
    for term in maps.contributions():
        if term.head is not None and term.layer is not None:
            value = layers[term.component, term.layer].values["contribution"][term.head]
        elif term.component == "feed-forward":
            value = layers[f"{'encoder' if maps.stacks == ('encoder.self',) else 'decoder'}.self", term.layer or 0]
            value = value.feed_forward["contribution"]
        else:
            continue
        assert value == pytest.approx(term.value)


def test_other_measures_are_those_of_the_maps(maps: AttentionMaps, sample: Sample) -> None:
    moved, rollout = layers_by_stack(sample, "weight times"), layers_by_stack(sample, "rollout")
    for stack in maps.stacks:
        assert np.array_equal(
            [rollout[stack, layer].weights()[0] for layer in maps.layers(stack)], maps.rollout(stack).numpy()
        )
        for layer in maps.layers(stack):
            expected = np.stack([maps.norm_weighted(stack, layer, head).numpy() for head in range(HEADS)])
            assert np.allclose(moved[stack, layer].weights() * expected.max(), expected, atol=1e-6)


def test_the_lens_names_what_the_maps_predict(maps: AttentionMaps, sample: Sample) -> None:
    lens, expected = sample.lens, maps.lens(5)
    assert lens is not None and len(lens.layers) == LAYERS + 1
    assert np.array_equal(lens.probabilities, expected.probabilities.numpy())
    name = {index: lens.vocabulary[number] for number, index in enumerate(expected.names)}
    ids = expected.ids.flatten().tolist()
    assert [lens.vocabulary[entry] for entry in lens.entries.flatten()] == [name[index] for index in ids]


def test_chosen_heads_are_alone_and_exact(maps: AttentionMaps) -> None:
    sample = run_sample(maps, "", SampleOptions(layers=[1], heads=[1]))
    for (_, number), layer in layers_by_stack(sample, "attention weight").items():
        assert number == 1 and layer.heads == (1,) and set(layer.exact) == {1}
    with pytest.raises(InputError, match="no head 7"):
        run_sample(maps, "", SampleOptions(heads=[7]))


def test_a_page_that_would_be_too_large_is_refused_before_anything_is_measured(
    maps: AttentionMaps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clearhead.interpret.view.explorer.encode.LARGEST", 3)
    monkeypatch.setattr(maps, "heads", lambda: pytest.fail("measured"))
    with pytest.raises(InputError, match="choose some with --layers and --heads"):
        run_sample(maps, "", SampleOptions())


def test_words_are_joined_at_spaces_and_scripts_without_spaces_are_not() -> None:
    tokenizer = train_tokenizer("byte", ["a"], vocab_size=300)
    ids = tokenizer.special_tokens.add_to(tokenizer.encode("ab c, 漢字 é"))[0]
    row = token_row(tokenizer, ids, num_given=4)
    words: dict[int, str] = {}
    for text, word in zip(row.texts, row.words.tolist(), strict=True):
        words[word] = words.get(word, "") + text
    whole = [text for text in words.values() if not text.startswith("<")]
    assert [text.strip() for text in whole if text.isascii()] == ["ab", "c", ","]
    assert sum("漢" in text for text in whole) == sum("字" in text for text in whole) == 1
    assert row.is_generated is not None and row.is_generated.tolist() == [False] * 4 + [True] * (len(ids) - 4)
    assert (np.diff(row.words) >= 0).all() and all(row.texts)


def test_a_page_is_one_file_and_a_notebook_shows_it(maps: AttentionMaps, tmp_path: Path) -> None:
    maps.save_html(tmp_path / "heads.html", title="A <model>")
    text = (tmp_path / "heads.html").read_text("utf-8")
    assert "A \\u003cmodel\\u003e" in text and "http://" not in text and "https://" not in text
    assert maps._repr_html_().startswith("<iframe")
    timeline = explorer_page("t", [("step 0", maps), ("step 1,000", maps)], is_timeline=True)
    assert timeline.is_timeline and ("steps kept", "0 · 1,000") in timeline.facts


def test_a_model_of_embeddings_has_a_page_without_predictions(tokenizer: Tokenizer) -> None:
    model = model_of(tokenizer, "encoder", "embed")
    head = spec.Head(layers=(spec.Pool(by="mean"), spec.L2Normalize()))
    module = core.build(model.spec.model_copy(update={"head": head})).eval()
    sample = run_sample(Model(module, model.tokenizers, model.task).attention(TEXT), "first", SampleOptions())
    assert sample.lens is None and len(sample.attentions) > 0
