"""Tiles and rows of maps equal the weights, pooled tiles their maxima, and spans the masks."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from clearhead.apps.serve import long_text
from clearhead.apps.serve.long_text import MASKED, MapTile, long_sample, rows_of_weights, tile
from clearhead.core.feedforward import FeedForward
from clearhead.interpret.maps.attention_maps import AttentionMaps
from clearhead.interpret.maps.page import SampleOptions, run_sample
from clearhead.interpret.view.explorer.encode import LEVELS, spans_of
from tests.apps.serve.cases import Browser, model_of, text_of
from tests.interpret.maps.test_page_models import maps_of, module_of

SIDE = 3
NAMES = ("encoder/post/buckets", "decoder/post/alibi", "window", "encoder-decoder/pre-grouped/buckets", "sink")


def nothing() -> None:
    """Do nothing: the client stays connected."""


def max_pool(weights: np.ndarray, pool: int) -> np.ndarray:
    rows, columns = (-(-size // pool) for size in weights.shape)
    cells = [
        [weights[r * pool : (r + 1) * pool, c * pool : (c + 1) * pool].max() for c in range(columns)]
        for r in range(rows)
    ]
    return np.array(cells)


@pytest.mark.parametrize("name", NAMES)
def test_pieces_are_the_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "SIDE", SIDE)
    monkeypatch.setattr(long_text, "_MOST_SCORES", 40)
    maps = maps_of(module_of(name))
    for (stack, layer), record in maps.records.items():
        weights = maps.weights(stack, layer).numpy()
        mask = record.mask()
        hidden = None if mask is None else ~mask[0, 0].expand(weights.shape[1:]).numpy()
        for head in (0, record.num_heads - 1):
            check_tiles(
                maps, stack, layer, head, weights[head] if hidden is None else np.where(hidden, -1, weights[head])
            )
        row = np.frombuffer(zlib.decompress(rows_of_weights(record, 4)), "<f4").reshape(record.num_heads, -1)
        np.testing.assert_allclose(np.maximum(row, 0), weights[:, 4], atol=1e-6)


def check_tiles(maps: AttentionMaps, stack: str, layer: int, head: int, weights: np.ndarray) -> None:
    for pool in (1, 2):
        expected, tiles = max_pool(weights, pool), []
        for row in range(-(-expected.shape[0] // SIDE)):
            for column in range(-(-expected.shape[1] // SIDE)):
                piece = MapTile(stack=stack, layer=layer, head=head, pool=pool, row=row, column=column)
                expected_tile = expected[row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE]
                codes = np.frombuffer(zlib.decompress(tile(maps.record(stack, layer), piece, nothing)), "<u2")
                tiles.append((expected_tile, codes.reshape(expected_tile.shape)))
        for expected_tile, codes in tiles:
            assert ((codes == MASKED) == (expected_tile < 0)).all()
            np.testing.assert_allclose(
                (codes[expected_tile >= 0] / LEVELS) ** 2, expected_tile[expected_tile >= 0], atol=5e-4
            )


@pytest.mark.parametrize("name", NAMES)
def test_a_long_page_knows_the_same_masks(name: str) -> None:
    maps = maps_of(module_of(name))
    short, long = run_sample(maps, "", SampleOptions()), long_sample(maps, "", nothing)
    assert long.rows.keys() == short.rows.keys()
    for long_stack, short_stack in zip(long.attentions, short.attentions, strict=False):
        size = len(short.rows[long_stack.queries].tokens), len(short.rows[long_stack.keys].tokens)
        assert (long_stack.stack, long_stack.queries, long_stack.keys) == (
            short_stack.stack,
            short_stack.queries,
            short_stack.keys,
        )
        for layer, whole in zip(long_stack.layers, short_stack.layers, strict=True):
            assert layer.weights is None and layer.heads == whole.heads and layer.mask_name == whole.mask_name
            assert list(layer.spans) == spans_of(whole.mask, size)


def test_a_long_text_is_asked_for_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "LARGEST", 10)
    browser = Browser(model_of("llama"))
    answer = browser.read(
        text=text_of(browser.runs.model), edits=[{"address": "decoder.layers.0.after", "positions": [1]}]
    )
    assert len(answer["page"]["samples"]) == 2
    assert all(
        layer["weights"] is None for sample in answer["page"]["samples"] for layer in sample["attentions"][0]["layers"]
    )
    query = {"stack": "decoder.self", "layer": 1, "head": 0, "sample": 1}
    codes = np.frombuffer(zlib.decompress(browser.get(f"tile/{answer['name']}", **query).content), "<u2")
    size = len(answer["page"]["samples"][0]["rows"]["decoder"]["texts"])
    assert codes.size == size**2 and (codes == MASKED).sum() == size * (size - 1) // 2


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_first_layer_of_a_long_text_comes_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = Browser(model_of(name))
    text = text_of(browser.runs.model)
    assert browser.read(text=text, is_beginning=True)["page"] == {}, "a short text comes as a whole"
    monkeypatch.setattr(long_text, "LARGEST", 10)
    with monkeypatch.context() as stopped:
        stopped.setattr(FeedForward, "forward", lambda *_: pytest.fail("something above the first attention runs"))
        begun = browser.read(text=f"{text} ", is_beginning=True)
    (stack,) = begun["page"]["samples"][0]["attentions"]
    assert [layer["layer"] for layer in stack["layers"]] == [0]
    whole = browser.read(text=f"{text} ")
    assert whole["name"] != begun["name"] and len(whole["page"]["samples"][0]["attentions"][0]["layers"]) > 1
    query = {"stack": stack["stack"], "layer": 0, "head": 1}
    assert (
        browser.get(f"tile/{begun['name']}", **query).content == browser.get(f"tile/{whole['name']}", **query).content
    )
