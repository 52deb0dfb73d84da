"""The page in headless Chromium: its views show the numbers of the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead.interpret.view.explorer.data import LayerAttention, Page, Sample
from clearhead.interpret.view.explorer.write import write_page
from tests.interpret.view.explorer import examples
from tests.interpret.view.explorer.browser import DRAWN, Tab, browser, layout_faults


@pytest.fixture(scope="module")
def running(chromium: str) -> Iterator[Any]:
    with browser(chromium) as chromium_browser:
        yield chromium_browser


@pytest.fixture(scope="module")
def decoder(running: Any, tmp_path_factory: pytest.TempPathFactory) -> Tab:
    return Tab(running, examples.decoder_page(), tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def translator(running: Any, tmp_path_factory: pytest.TempPathFactory) -> Tab:
    return Tab(running, examples.translation_page(), tmp_path_factory.mktemp("translator"))


@pytest.fixture(scope="module")
def timeline(running: Any, tmp_path_factory: pytest.TempPathFactory) -> Tab:
    return Tab(running, examples.timeline_page(), tmp_path_factory.mktemp("timeline"))


# A copy is read: Chromium warns when the page's own canvas is read often, as it is while a busy machine draws.
HAS_COLOR = """
const hasColor = (canvas, width, height) => {
  const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  return new Uint32Array(copy.getImageData(0, 0, width, height).data.buffer).some(Boolean);
};
"""
PAINTED = f"""() => {{
  {HAS_COLOR}
  return hasColor(document.querySelector(".line-canvas canvas"), 300, 600);
}}"""


WATCH = (
    HAS_COLOR
    + """
globalThis.painted = [];
const isPainted = () => {
  const canvas = document.querySelector(".heat > canvas");
  return canvas && hasColor(canvas, canvas.width, canvas.height);
};
const watched = { subtree: true, attributeFilter: ["data-drawn"] };
new MutationObserver(() => painted.push(isPainted())).observe(document, watched);
globalThis.resized = (root) => new Promise((done) => {
  root.style.width = "700px";
  const observer = new ResizeObserver(() => { observer.disconnect(); done(isPainted()); });
  observer.observe(root);
});
"""
)


@pytest.mark.parametrize("page", ["decoder", "translation"])
def test_what_is_drawn_is_on_the_canvas(running: Any, tmp_path: Path, page: str) -> None:
    path = tmp_path / "page.html"
    write_page(getattr(examples, f"{page}_page")(), path)
    tab = running.new_page(viewport={"width": 1440, "height": 900})
    tab.add_init_script(WATCH)
    tab.goto(f"{path.as_uri()}#view=matrix")
    tab.wait_for_function(DRAWN)
    assert tab.evaluate("painted") == [True], "no screenshot finds an empty canvas once the page says that it is drawn"
    assert tab.evaluate("resized(document.querySelector('.heat'))"), "nor does one of another width"


def test_the_last_of_two_states_is_shown(running: Any, tmp_path: Path) -> None:
    tab = Tab(running, examples.decoder_page(), tmp_path)
    for key in (3, 11):
        tab.tab.evaluate(f"location.hash = '#view=matrix&layer=2&head=1&query=12&key={key}'")
    tab.wait_until_drawn()
    tab.tab.wait_for_timeout(300)
    assert float(tab.tab.locator(".cell").get_attribute("data-value")) == pytest.approx(
        DECODER_LAYERS[2].weights()[1, 12, 11], abs=5e-4
    )


def only(page: Page) -> Sample:
    (sample,) = page.samples
    return sample


def layers_of(page: Page, stack: str) -> tuple[LayerAttention, ...]:
    return next(attention for attention in only(page).attentions if attention.stack == stack).layers


DECODER_LAYERS = layers_of(examples.decoder_page(), "decoder.self")


@pytest.mark.parametrize(("layer", "head", "digits"), [(0, 3, 3), (1, 2, 7), (2, 4, 3)])
def test_the_matrix_says_the_weights_that_it_was_given(decoder: Tab, layer: int, head: int, digits: int) -> None:
    weights = DECODER_LAYERS[layer].weights()[head]
    for query, key in [(12, 11), (12, 12), (30, 25)]:
        tab = decoder.go(f"view=matrix&layer={layer}&head={head}&query={query}&key={key}")
        value = float(tab.locator(".cell").get_attribute("data-value"))
        assert value == pytest.approx(weights[query, key], abs=5e-4 if digits == 3 else 1e-12)
        assert tab.locator(".cell b").inner_text() == f"{value:.{digits}f}"


def test_the_matrix_says_what_the_mask_forbids(decoder: Tab) -> None:
    tab = decoder.go("view=matrix&layer=2&head=0&query=20&key=21")
    assert tab.locator(".cell b").inner_text() == "masked"
    assert "window: 7 before, 0 after" in tab.locator(".panel").inner_text()


def test_the_share_of_no_token_is_what_the_weights_leave(decoder: Tab) -> None:
    decoder.go("view=matrix&layer=2&head=3&query=17&key=17")
    share = 1 - DECODER_LAYERS[2].weights()[3, 17].sum()
    assert decoder.numbers("tr.sink .number")[0] == pytest.approx(share, abs=1e-3)


def test_joined_subwords_take_the_mean_of_queries_and_the_sum_of_keys(decoder: Tab) -> None:
    row = only(examples.decoder_page()).rows["decoder"]
    word = [index for index, number in enumerate(row.words) if number == row.words[16]]
    assert [row.texts[index] for index in word] == [" un", "believ", "ably"]
    weights = DECODER_LAYERS[1].weights()[2]
    tab = decoder.go(f"view=matrix&layer=1&head=2&query={word[2]}&key={word[1]}&join=1")
    expected = weights[np.ix_(word, word)].sum(axis=1).mean()
    assert float(tab.locator(".cell").get_attribute("data-value")) == pytest.approx(expected, abs=1e-6)
    assert "unbelievably" in tab.locator(".cell").inner_text()


def test_the_overview_shows_every_head_in_the_order_of_a_column(decoder: Tab) -> None:
    tab = decoder.go("view=overview&sort=entropy")
    shown = [name.split(",")[:2] for name in tab.locator(".head").evaluate_all("all => all.map(one => one.ariaLabel)")]
    order = sorted(
        ((layer.layer, head) for layer in DECODER_LAYERS for head in layer.heads),
        key=lambda at: -DECODER_LAYERS[at[0]].values["entropy"][at[1]],
    )
    assert shown == [[f"layer {layer}", f" head {head}"] for layer, head in order]
    tab.wait_for_function("() => [...document.querySelectorAll('.head canvas')].every(one => one.width === 31)")


def test_the_overview_dims_the_heads_without_the_chosen_pattern(decoder: Tab) -> None:
    tab = decoder.go("view=overview&pattern=first+token")
    expected = sum(name == "first token" for layer in DECODER_LAYERS for name in layer.patterns)
    assert tab.locator(".head:not(.dim)").count() == expected > 0


def test_the_inspector_says_the_numbers_of_a_head(decoder: Tab) -> None:
    decoder.go("view=overview&layer=2&head=1")
    values = [DECODER_LAYERS[2].values[column.name][1] for column in examples.COLUMNS]
    assert decoder.numbers(".strip-value") == pytest.approx(values, rel=6e-3)


def test_lines_lead_from_a_query_to_the_keys_that_it_looks_at(decoder: Tab) -> None:
    tab = decoder.go("view=lines&layer=1&head=2&query=19")
    weights = DECODER_LAYERS[1].weights()[2, 19]
    shares = tab.locator(".line-tokens.right .share").all_inner_texts()
    assert [float(share or 0) for share in shares] == pytest.approx(np.where(weights >= 0.005, weights, 0), abs=5.1e-3)
    tab.wait_for_function(PAINTED)


def test_lines_of_a_key_say_who_looks_at_it(decoder: Tab) -> None:
    decoder.go("view=lines&layer=1&head=2&key=19")
    weights = DECODER_LAYERS[1].weights()[2, :, 19]
    assert decoder.numbers(".keys tbody .number")[0] == pytest.approx(weights.max(), abs=1e-6)


@pytest.mark.parametrize("over", ["mean", "max"])
def test_a_token_looks_through_every_layer(decoder: Tab, over: str) -> None:
    tab = decoder.go(f"view=token&query=23&over={over}")
    for side, axis in [(0, 1), (1, 2)]:
        lines = tab.locator(".token-side").nth(side).locator(".layer-line")
        assert lines.count() == 3
        for layer in DECODER_LAYERS[:2]:
            weights = getattr(layer.weights(), over)(axis=0)
            values = weights[23] if axis == 1 else weights[:, 23]
            first = lines.nth(layer.layer).locator(".look b").first.inner_text()
            assert float(first) == pytest.approx(values.max(), abs=1.1e-3)


def test_the_neuron_view_computes_the_weight_from_query_and_key(decoder: Tab) -> None:
    tab = decoder.go("view=neuron&query=21&key=13")
    head, weights = DECODER_LAYERS[1].exact[2], DECODER_LAYERS[1].weights()[2]
    query, key = head.query[21].astype(float), head.key[13].astype(float)
    assert head.bias is not None
    expected = {
        "query · key": query @ key,
        "× scale": query @ key * head.scale,
        "+ bias": query @ key * head.scale + head.bias[21, 13],
        "softmax": weights[21, 13],
    }
    for name, value in expected.items():
        shown = float(tab.locator(f'[data-step="{name}"]').inner_text().replace("−", "-"))
        assert shown == pytest.approx(value, abs=1.01e-6), name
    cells = tab.locator(".vector td").evaluate_all("all => all.map(one => Number(one.title))")
    assert cells == pytest.approx(np.concatenate([query, key, query * key]), abs=1e-6)


def test_the_alignment_is_the_mean_of_the_heads(translator: Tab) -> None:
    tab = translator.go("view=alignment&layer=1")
    weights = layers_of(examples.translation_page(), "decoder.memory")[1].weights().mean(axis=0)
    rows = tab.locator(".panel tbody tr")
    source, _, written = (row.texts for row in only(examples.translation_page()).rows.values())
    for query, best in enumerate(weights.argmax(axis=1)):
        cells = rows.nth(query).locator("td").all_inner_texts()
        assert float(cells[2]) == pytest.approx(weights[query, best], abs=1e-3)
        assert [cell.replace("␣", " ") for cell in cells[:2]] == [written[query], source[best]]


def test_the_lens_says_the_predictions_of_each_layer(decoder: Tab) -> None:
    lens = only(examples.decoder_page()).lens
    assert lens is not None
    tab = decoder.go("view=lens&layer=3&query=4")
    chosen = tab.locator("td.chosen .token-text").inner_text().replace("␣", " ").replace("↵", "\n")
    assert chosen == lens.vocabulary[lens.entries[3, 4, 0]]
    assert decoder.numbers(".panel tbody .number") == pytest.approx(lens.probabilities[3, 4], abs=5.1e-5)
    assert tab.locator("tbody tr").count() >= len(lens.layers)


def test_the_tree_shows_what_was_kept_and_pruned_and_why(translator: Tab) -> None:
    tab = translator.go("view=beams")
    beams = only(examples.translation_page()).beams
    first = [index for index, node in enumerate(beams) if node.step <= 5]
    for state in ("kept", "pruned"):
        shown = tab.locator(f".node.{state}").evaluate_all("all => all.map(one => Number(one.dataset.node))")
        assert {index for index in first if beams[index].state == state} <= set(shown)
    target = only(examples.translation_page()).rows["decoder"].texts
    assert tab.locator(".hypothesis").inner_text() == "".join(target) + "</s>"
    pruned = next(index for index, node in enumerate(beams) if node.state == "pruned")
    panel = translator.go(f"view=beams&node={pruned}").locator(".panel").inner_text()
    assert beams[pruned].reason in panel
    assert f"{beams[pruned].score:.4f}".replace("-", "−") in panel


def test_twelve_layers_of_twelve_heads_fit_every_window(running: Any, tmp_path: Path, screenshots: Path) -> None:
    tab = Tab(running, examples.decoder_page(40, layers=12, heads=12, exact=()), tmp_path)
    tab.wait_until_drawn()
    views = ["view=overview", "view=overview&sort=entropy", "view=matrix", "view=lines", "view=token", "view=lens"]
    assert not layout_faults(tab.tab, "twelve", screenshots, views)
    tab.tab.close()


@pytest.mark.parametrize("heads", [4, 12])
def test_all_heads_are_in_the_window(running: Any, tmp_path: Path, heads: int) -> None:
    tab = Tab(running, examples.decoder_page(layers=heads, heads=heads, exact=()), tmp_path).go("view=overview")
    last = tab.locator(".head").last.bounding_box()
    assert last["y"] + last["height"] <= 900
    tab.close()


def test_grouped_heads_say_which_heads_share_their_keys(translator: Tab) -> None:
    tab = translator.go("view=overview&stack=decoder.self&head=3")
    assert "shared by heads 2–3" in tab.locator(".panel").inner_text()


def test_views_without_data_are_not_offered(decoder: Tab, translator: Tab) -> None:
    decoder.go("view=overview")
    assert decoder.texts("nav button") == ["Overview", "Matrix", "Lines", "Token", "Neuron", "Lens"]
    translator.go("view=overview")
    everything = ["Overview", "Matrix", "Lines", "Token", "Neuron", "Alignment", "Lens", "Beams"]
    assert translator.texts("nav button") == everything


def test_two_checkpoints_stand_side_by_side_with_their_difference(timeline: Tab) -> None:
    first, last = (sample.attentions[0].layers[0].weights()[0] for sample in examples.timeline_page().samples[::2])
    query, key = np.unravel_index(np.abs(last - first).argmax(), first.shape)
    first_weight, last_weight = first[query, key], last[query, key]
    tab = timeline.go(f"view=matrix&layer=0&head=0&query={query}&key={key}&sample=0&other=2&difference=1")
    values = tab.locator(".cell").evaluate_all("all => all.map(one => Number(one.dataset.value))")
    assert values == pytest.approx([first_weight, last_weight, last_weight - first_weight], abs=1e-3)


def test_checkpoints_are_played(timeline: Tab) -> None:
    tab = timeline.go("view=overview")
    tab.keyboard.press("p")
    tab.wait_for_function("() => document.querySelector('output').textContent === 'step 200'")
    assert "sample=2" in tab.evaluate("location.hash") or tab.wait_for_function(
        "() => location.hash.includes('sample=2')"
    )
    assert tab.locator(".player").inner_text().split("\n")[-1].strip() == "3 of 3"


def test_a_link_leads_back_to_what_it_shows(decoder: Tab) -> None:
    tab = decoder.go("view=matrix&layer=1&head=2&query=20&key=3&scale=linear&join=0")
    before = tab.locator(".panel").inner_text()
    tab.reload()
    assert decoder.wait_until_drawn().locator(".panel").inner_text() == before
    assert tab.locator("nav [aria-current]").inner_text() == "Matrix"


def test_every_view_is_reached_by_the_keyboard(decoder: Tab) -> None:
    tab = decoder.go("view=overview")
    for number, name in enumerate(decoder.texts("nav button"), 1):
        tab.keyboard.press(str(number))
        decoder.wait_until_drawn()
        assert tab.locator("nav [aria-current]").inner_text() == name
    tab.keyboard.press("?")
    assert tab.locator("dialog[open]").count() == 1
    tab.keyboard.press("Escape")
    tab.locator("dialog[open]").wait_for(state="detached")
    tab.keyboard.press("2")
    tab.keyboard.press("]")
    decoder.wait_until_drawn()
    assert "Layer 1" in tab.locator(".panel h3").inner_text()


def test_arrow_keys_walk_through_the_matrix_and_say_the_weight(decoder: Tab) -> None:
    tab = decoder.go("view=matrix&layer=0&head=1&query=8&key=6")
    tab.locator(".heat").focus()
    tab.keyboard.press("ArrowRight")
    decoder.wait_until_drawn()
    texts = only(examples.decoder_page()).rows["decoder"].texts
    weight = DECODER_LAYERS[0].weights()[1, 8, 7]
    assert tab.locator("#live").inner_text() == f"“{texts[8]}” attends to “{texts[7]}”: {weight:.3f}"


def test_zoom_is_part_of_the_link(decoder: Tab) -> None:
    tab = decoder.go("view=matrix&layer=0&head=1")
    tab.get_by_label("zoom in").click()
    tab.wait_for_function("() => location.hash.includes('box=')")
    assert tab.locator(".heat.zoomed").count() == 1
    tab.get_by_label("show all").click()
    tab.wait_for_function("() => !location.hash.includes('box=')")


def test_a_state_that_the_page_does_not_have_shows_the_nearest(decoder: Tab) -> None:
    tab = decoder.go("view=nothing&layer=99&head=77&stack=encoder.self&query=9999&other=5&sort=none&box=x")
    assert tab.locator("nav [aria-current]").inner_text() == "Overview"
    assert decoder.go("view=matrix&layer=99&head=-1&query=9999&key=2").locator(".heat").count() == 1
    first = decoder.go("view=lens&layer=-1&query=0").locator(".panel").inner_text()
    assert decoder.go("view=lens&layer=-3&query=-3").locator(".panel").inner_text() == first


@pytest.mark.parametrize("view", ["overview", "matrix", "lines", "token", "neuron", "alignment", "lens", "beams"])
def test_no_number_of_a_link_breaks_a_view(view: str, decoder: Tab, translator: Tab) -> None:
    names = ("measure", "layer", "head", "query", "key", "sample", "other", "difference", "join", "up", "least", "node")
    for tab in (decoder, translator):
        for number in ("-3", "-1", "99", "1e300"):
            tab.go(f"view={view}&" + "&".join(f"{name}={number}" for name in names))
            tab.go(f"view={view}&layer={number}&query={number}")


def test_effects_of_looks_are_shown_above_the_keys(running: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    page = examples.decoder_page(13, layers=1, heads=3)
    (stack,) = only(page).attentions
    layer = dataclasses.replace(stack.layers[0], key_effects=np.ones((3, 13), np.float32))
    sample = dataclasses.replace(only(page), attentions=(dataclasses.replace(stack, layers=(layer,)),))
    tab = Tab(running, dataclasses.replace(page, samples=(sample,)), tmp_path_factory.mktemp("effects"))
    assert "Strip above the columns" in tab.go("view=matrix&query=3&key=2").locator(".panel").inner_text()
