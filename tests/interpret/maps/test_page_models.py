"""Pages of models of every form: masked weights are zero, and queries and keys reproduce the weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from clearhead import core, spec
from clearhead.base.errors import InputError
from clearhead.core import Transformer, build
from clearhead.interpret.maps.attention_maps import AttentionMaps, attend
from clearhead.interpret.maps.map_inputs import MapInputs
from clearhead.interpret.maps.page import SampleOptions, run_sample
from clearhead.interpret.view.explorer.data import ExactHead, LayerAttention, Page
from clearhead.interpret.view.explorer.write import page_html
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer
from tests.laws.hf_parts import hf_part
from tests.laws.tiny import hparams as hparams_of
from tests.laws.tiny import resolve_spec, tiny, with_mask

SOURCE, TARGET = 11, 7
WINDOWED = "decoder/pre-grouped/rotary"
NAMES = (
    "encoder/post/buckets", "decoder/post/alibi", WINDOWED, "encoder-decoder/pre-grouped/buckets", "window",
    "window of an encoder", "soft cap on the memory", "sink on the memory", "sink", "scaled alibi", "disentangled",
    "disentangled, own projections", "shared layers with a memory",
)  # fmt: skip


def module_of(name: str) -> Transformer:
    if name == "window":
        return build(with_mask(resolve_spec(hparams_of(WINDOWED)), spec.Window(before=2, after=0), "decoder")).eval()
    if name == "window of an encoder":
        windowed = with_mask(
            resolve_spec(hparams_of("encoder/post/learned")), spec.Window(before=1, after=2), "encoder"
        )
        return build(windowed).eval()
    return tiny(name) if "/" in name else hf_part(name)


def words(count: int) -> Tokenizer:
    """Return a tokenizer with one entry for each row of a table."""
    return train_tokenizer("word", [" ".join(f"w{number}" for number in range(count - 4))], vocab_size=count)


def maps_of(module: Transformer) -> AttentionMaps:
    is_two = module.encoder is not None and module.decoder is not None
    tokenizers = TokenizerPair(words(module.num_source_ids), words(module.num_target_ids), joint=False)
    source = core.Sequence(torch.randint(4, module.num_source_ids, (1, SOURCE)))
    target = core.Sequence(torch.randint(4, module.num_target_ids, (1, TARGET))) if is_two else None
    last = source if target is None else target
    labels = () if module.decoder is None else (*last.ids[0, 1:].tolist(), 5)
    affixes = (tokenizers.source.special_tokens.for_text,) * (1 + is_two)
    task = TaskRecord(kind="fill" if module.decoder is None else "translate" if is_two else "generate")
    return attend(module, tokenizers, task, MapInputs(source, target, labels=labels, affixes=affixes))


def softmax(exact: ExactHead, mask: np.ndarray | None) -> np.ndarray:
    """Compute the weights of a head from its `ExactHead`."""
    scores = exact.query.astype(np.float64) @ exact.key.T.astype(np.float64) * exact.scale
    if exact.soft_cap is not None:
        scores = exact.soft_cap * np.tanh(scores / exact.soft_cap)
    scores = scores if exact.bias is None else scores + exact.bias
    scores = scores if mask is None else np.where(mask, scores, -math.inf)
    shares = np.exp(scores)
    return shares / (shares.sum(1, keepdims=True) + (0.0 if exact.sink is None else math.exp(exact.sink)))


def check(layer: LayerAttention) -> None:
    weights = layer.weights()
    assert weights.min() >= 0.0 and weights.max() <= 1.0 + 1e-5
    assert layer.mask is None or not weights[:, ~layer.mask].any(), "what the mask hides has no weight"
    for head, exact in layer.exact.items():
        assert np.allclose(softmax(exact, layer.mask), weights[head], atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_masks_and_exact_numbers(name: str) -> None:
    maps = maps_of(module_of(name))
    sample = run_sample(maps, "", SampleOptions())
    assert {attention.stack for attention in sample.attentions} == set(maps.stacks)
    for attention in sample.attentions:
        for layer in attention.layers:
            check(layer)
    assert any(layer.exact for attention in sample.attentions for layer in attention.layers)
    assert "</html>" in page_html(Page("t", (sample,)))


def test_rollout_reaches_beyond_a_window() -> None:
    """Two layers see twice as far as one; the page shows it."""
    sample = run_sample(maps_of(module_of("window")), "", SampleOptions())
    weights, shares = (
        [layer.weights()[0] for layer in attention.layers]
        for attention in sample.attentions
        if attention.measure.startswith(("attention", "rollout"))
    )
    assert not weights[1][5, 1] and shares[1][5, 1] > 0


def test_effects_of_keys_are_measured_for_chosen_heads() -> None:
    maps, reports = maps_of(module_of("encoder-decoder/pre-grouped/buckets")), list[tuple[int, int]]()
    options = SampleOptions(layers=[1], heads=[0, 3], effects=True)
    sample = run_sample(maps, "", options, notify=lambda done, total: reports.append((done, total)))
    for attention in sample.attentions[: len(maps.stacks)]:
        (layer,) = attention.layers
        assert layer.key_effects is not None
        for row, head in enumerate((0, 3)):
            expected = maps.key_effects(attention.stack, 1, head).numpy()
            assert np.allclose(layer.key_effects[row], expected, atol=1e-6)
    done, totals = zip(*reports, strict=True)
    assert list(done) == sorted(set(done)) and set(totals) == {done[-1]}
    whole = run_sample(maps, "", SampleOptions(effects=True))
    assert whole.attentions[0].layers[0].key_effects is None, "a run for each key of each head is too much"


def test_the_lens_of_a_classifier_has_one_position() -> None:
    names = ("a", "b", "c")
    head = spec.Head(layers=(spec.Pool(by="mean"), spec.Linear(size=len(names))))
    module = build(tiny("encoder/post/learned", tie="none").spec.model_copy(update={"head": head})).eval()
    maps = maps_of(module)
    maps.task = TaskRecord(kind="classify", labels=names, label_kind="single_label")
    lens = run_sample(maps, "", SampleOptions()).lens
    assert lens is not None and set(lens.vocabulary) == set(names)
    assert lens.entries.shape == (len(lens.layers), 1, len(names)) and lens.targets is not None
    assert np.allclose(lens.probabilities.sum(-1), 1.0, atol=1e-5)


def test_another_module_reads_the_same_tokens() -> None:
    first, second = tiny(WINDOWED), tiny(WINDOWED)
    maps = maps_of(first)
    again = maps.with_module(second)
    assert again.tokens == maps.tokens and not torch.equal(
        again.weights("decoder.self", 1), maps.weights("decoder.self", 1)
    )
    assert torch.equal(maps.with_module(first).weights("decoder.self", 1), maps.weights("decoder.self", 1))
    with pytest.raises(InputError, match="text 1 has 11 tokens, but the model has 5 positions"):
        maps.with_module(tiny("decoder/pre-grouped/learned", max_positions=5))
