"""A page stores weights within the promised error, no masked weights, and nothing too large."""

from __future__ import annotations

import base64
import dataclasses
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.base.errors import InputError
from clearhead.interpret.view.explorer.data import LayerAttention
from clearhead.interpret.view.explorer.encode import LEVELS, Encoder, spans_of
from tests.interpret.view.explorer import examples


def decode(text: str, dtype: str) -> np.ndarray:
    """Decode an array of the file, independently of the page."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    size = np.dtype(dtype).itemsize
    return np.ascontiguousarray(planes.reshape(size, -1).T).view(dtype).ravel()


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["full", "causal", "window"]), st.booleans(), st.integers(0, 9))
def test_weights_come_back_within_the_promised_error(mask: str, has_sink: bool, seed: int) -> None:
    layer = examples.layer_attention(
        np.random.default_rng(seed), seed, (13, 13), heads=3, kv_heads=3, mask=mask, has_sink=has_sink, exact=(1,)
    )
    page = examples.decoder_page(13, layers=1, heads=3, exact=())
    (stack,) = page.samples[0].attentions
    sample = dataclasses.replace(page.samples[0], attentions=(dataclasses.replace(stack, layers=(layer,)),), lens=None)
    encoder = Encoder()
    content = encoder.page(dataclasses.replace(page, samples=(sample,)))
    codes, exact = encoder.texts()
    allowed = np.ones((13, 13), bool) if layer.mask is None else layer.mask
    stored = (decode(codes, "<u2") / LEVELS) ** 2
    truth = layer.weights()
    weights = stored[: 3 * allowed.sum()].reshape(3, -1)
    assert np.abs(weights - truth[:, allowed]).max() <= 5e-4
    assert stored.size == 3 * (allowed.sum() + 13 * has_sink)
    if has_sink:
        assert np.abs(stored[3 * allowed.sum() :].reshape(3, 13) - (1 - truth.sum(axis=2))).max() <= 5e-4
    numbers = decode(exact, "<f4")
    assert (numbers[: allowed.sum()] == truth[1][allowed]).all()
    assert content["samples"][0]["attentions"][0]["layers"][0]["exact"].keys() == {"1"}


def test_one_layer_is_in_memory_at_a_time() -> None:
    page = examples.decoder_page(13, layers=5, heads=3)
    (stack,) = page.samples[0].attentions
    computed: list[int] = []

    def count_calls(layer: LayerAttention) -> LayerAttention:
        return dataclasses.replace(layer, weights=lambda: computed.append(layer.layer) or layer.weights())

    layers = tuple(map(count_calls, stack.layers))
    sample = dataclasses.replace(page.samples[0], attentions=(dataclasses.replace(stack, layers=layers),))
    encoder = Encoder()
    encoder.page(dataclasses.replace(page, samples=(sample,)))
    texts = encoder.texts()
    assert computed == []
    next(texts)
    assert computed == [0]
    list(texts)
    assert computed == [0, 1, 2, 3, 4], "each layer is computed once, its exact heads included"


def test_numbers_of_heads_come_back_to_the_last_digit() -> None:
    page = examples.decoder_page(13, layers=2, heads=3)
    content = Encoder().page(page)
    for layer, stored in zip(
        page.samples[0].attentions[0].layers, content["samples"][0]["attentions"][0]["layers"], strict=True
    ):
        for name, values in layer.values.items():
            assert (np.array(stored["values"][name], np.float32) == values).all()


def test_a_mask_with_a_gap_is_refused() -> None:
    mask = np.array([[True, False, True]])
    with pytest.raises(InputError, match="visible keys are contiguous"):
        spans_of(mask, (1, 3))


def test_a_query_that_sees_nothing_stores_nothing() -> None:
    assert spans_of(np.array([[False, False], [True, False]]), (2, 2)) == [0, -1, 0, 0]


def test_a_page_too_large_for_a_browser_is_refused_before_anything_is_computed() -> None:
    page = examples.decoder_page(7, layers=1, heads=3, exact=())
    size = 4001

    def fail() -> np.ndarray:
        raise AssertionError("computed")

    (stack,) = page.samples[0].attentions
    layer = dataclasses.replace(stack.layers[0], mask=None, weights=fail)
    sample = dataclasses.replace(
        page.samples[0], rows={"decoder": examples.example_row(size)},
        attentions=(dataclasses.replace(stack, layers=(layer,)),), lens=None,
    )  # fmt: skip
    with pytest.raises(InputError, match="--layers and --heads"):
        Encoder().page(dataclasses.replace(page, samples=(sample,)))
