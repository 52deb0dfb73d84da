"""The page in headless Chromium: what it draws and the numbers that it says are those that it was given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.view.explorer import examples
from tests.view.explorer.browser import Tab, browser


@pytest.fixture(scope="module")
def decoder(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(chromium) as running:
        yield Tab(running.new_page(), examples.decoder_page(), tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize(("layer", "head", "digits"), [(0, 3, 3), (1, 2, 7), (2, 4, 3)])
def test_the_matrix_says_the_weights_that_it_was_given(decoder: Tab, layer: int, head: int, digits: int) -> None:
    weights = examples.decoder_page().samples[0].attentions[0].layers[layer].weights()[head]
    for query, key in [(12, 11), (12, 12), (30, 25)]:
        tab = decoder.go(f"view=matrix&layer={layer}&head={head}&query={query}&key={key}")
        value = float(tab.locator(".cell").get_attribute("data-value"))
        assert value == pytest.approx(weights[query, key], abs=5e-4 if digits == 3 else 1e-12)
        assert tab.locator(".cell b").inner_text() == f"{value:.{digits}f}"


def test_the_overview_shows_every_head_in_the_order_of_a_column(decoder: Tab, tmp_path: Path) -> None:
    layers = examples.decoder_page().samples[0].attentions[0].layers
    tab = decoder.go("view=overview&sort=entropy")
    shown = [name.split(",")[:2] for name in tab.locator(".head").evaluate_all("all => all.map(one => one.ariaLabel)")]
    order = sorted(
        ((layer.layer, head) for layer in layers for head in layer.heads),
        key=lambda at: -layers[at[0]].values["entropy"][at[1]],
    )
    assert shown == [[f"layer {layer}", f" head {head}"] for layer, head in order]
