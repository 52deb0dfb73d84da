"""A page explains itself when it opens, on a desktop and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clearhead.interpret.view.explorer.data import HeadColumn, Page
from tests.interpret.view.explorer import examples
from tests.interpret.view.explorer.browser import Tab, browser

WORST = replace(examples.COLUMNS[0], name="nowhere", title="measured nowhere")
ALIGNMENT = HeadColumn("alignment", "alignment", "The share of links that are best in both directions.")


TEXTS = (("reads", "Monday, 5 January"), ("writes", "Montag, der 5."))
CHOSEN = {
    "matrix": "h4 .token-text",
    "token": ".token-texts [aria-pressed=true]",
    "neuron": ".token[aria-pressed=true]",
}


def build_page() -> Page:
    """Build a page of a translator with texts, special tokens, and a head with a known alignment."""
    page = examples.translation_page()
    (sample,) = page.samples
    rows = {
        name: replace(row, is_special=np.array([text in ("<s>", "</s>") for text in row.texts]))
        for name, row in sample.rows.items()
    }
    stacks = list(sample.attentions)
    layers = tuple(
        replace(
            layer,
            mask_name="none",
            values={**layer.values, "alignment": np.array([0.1, 0.2, 0.3, 0.1 + 0.8 * layer.layer])},
        )
        for layer in stacks[2].layers
    )
    nodes = [replace(node, score=-1e-5) if node.rank == 0 else node for node in sample.beams]
    changed = replace(
        sample, rows=rows, attentions=(*stacks[:2], replace(stacks[2], layers=layers)), beams=tuple(nodes),
        columns=(*sample.columns, WORST, ALIGNMENT), texts=TEXTS,
    )  # fmt: skip
    return replace(page, samples=(changed,), facts=(("task", "translate"),))


@pytest.fixture(scope="module")
def running(chromium: str) -> Iterator[Any]:
    with browser(chromium) as chromium_browser:
        yield chromium_browser


@pytest.fixture(scope="module")
def desk(running: Any, tmp_path_factory: pytest.TempPathFactory) -> Tab:
    return Tab(running, build_page(), tmp_path_factory.mktemp("desk"))


def test_two_stacks_open_on_what_they_linked(desk: Tab) -> None:
    tab = desk.wait_until_drawn()
    assert tab.locator("nav [aria-current]").inner_text() == "Alignment"
    assert (
        tab.locator(".panel .tag").inner_text()
        == "Layer 1, head 3: the most consistent alignment of all heads (0.90 of 1)."
    )


def test_every_view_opens_on_the_head_of_the_alignment(desk: Tab) -> None:
    assert desk.go("view=overview").locator(".head.chosen").get_attribute("aria-label").startswith("layer 1, head 3")
    assert desk.go("view=matrix").locator(".panel h3").inner_text() == "Layer 1, head 3"
    desk.go("view=matrix&layer=0&head=0").keyboard.press("]")
    desk.wait_until_drawn()
    assert desk.tab.locator(".panel h3").inner_text() == "Layer 1, head 0"


@pytest.mark.parametrize("view", ["overview", "matrix", "lines", "token", "neuron", "alignment", "lens", "beams"])
def test_every_view_says_what_is_read_and_what_a_cell_means(desk: Tab, view: str) -> None:
    tab = desk.go(f"view={view}")
    assert desk.texts(".texts p") == ["reads Monday, 5 January", "writes Montag, der 5."]
    assert "task translate" in tab.locator(".title").inner_text()
    words = tab.locator(".words").inner_text()
    if view in ("overview", "matrix", "alignment"):
        assert "one step of the decoder" in words and "dark cells are the source tokens that it attends to" in words
        tab.keyboard.press("t")
        assert "bright cells" in tab.locator(".words").inner_text()
        tab.keyboard.press("t")
    assert words.endswith(".") and "−0.000" not in tab.locator("body").inner_text()


def test_views_open_on_a_token_of_the_text(desk: Tab) -> None:
    for view, chosen in CHOSEN.items():
        text = desk.go(f"view={view}&stack=encoder.self").locator(chosen).first.inner_text()
        assert text.strip("␣") == "1998", view


def test_layers_count_alike(desk: Tab) -> None:
    for layer, name in [(1, "After layer 1"), (0, "After layer 0"), (-1, "After the embedding")]:
        assert desk.go(f"view=lens&layer={layer}&query=2").locator(".panel h3").inner_text() == name
    assert "The next token is “,”" in desk.tab.locator(".panel").inner_text()
    assert desk.texts(".lens tbody th") == ["layer 1", "layer 0", "embedding"]
    desk.tab.locator("td[data-depth='2']").first.click()
    assert "Layer 1, head 0" in desk.go("view=matrix&layer=1&head=0").locator(".panel").inner_text()


FOLLOW = """() => new Promise(done => {
  document.querySelector("td[data-depth='0']").click();
  history.replaceState(null, "", "#view=overview");  // as a link does before the page is told
  setTimeout(() => { dispatchEvent(new HashChangeEvent("hashchange")); done(); }, 300);
})"""


def test_a_link_is_followed_while_the_address_of_a_choice_waits(desk: Tab) -> None:
    desk.go("view=lens&layer=1&query=2").evaluate(FOLLOW)
    tab = desk.wait_until_drawn()
    assert tab.evaluate("location.hash") == "#view=overview"
    assert tab.locator(".head").count() > 3


def test_the_overview_uses_the_width_and_explains_its_numbers(desk: Tab) -> None:
    tab = desk.go("view=overview")
    right, panel = tab.locator(".head").nth(3).bounding_box(), tab.locator(".panel").bounding_box()
    assert 0 < panel["x"] - right["x"] - right["width"] < 60, "the heads reach the panel"
    assert panel["x"] + panel["width"] > 1440 - 30, "the panel reaches the edge"
    assert tab.locator(".layer-name small").first.inner_text() == "no mask"
    names, notes = desk.texts(".strip-name"), desk.texts(".strip-note")
    assert "measured nowhere" not in names and len(names) == len(notes) and all(notes)
    assert tab.locator(".preview canvas").bounding_box()["height"] > 100
    assert "measured nowhere" not in tab.locator("main").inner_text() + tab.locator(".controls").inner_text()


def test_a_phone_shows_data_in_its_first_half(running: Any, tmp_path: Any) -> None:
    tab = Tab(running, build_page(), tmp_path, width=390).go("view=overview")
    assert tab.locator(".head").first.bounding_box()["y"] < 844 / 2
