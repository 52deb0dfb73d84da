"""A tiny model of every loadable architecture in headless Chromium: each view draws, and its weights are the model's.

Two pages hold all models: one with the exact numbers of every head, one with 11 bits for each weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from clearhead import spec
from clearhead.checkpoints.hf import registry
from clearhead.core import Transformer, build
from clearhead.interpret.maps.attention_maps import AttentionMaps
from clearhead.interpret.maps.hook_points import capture
from clearhead.interpret.maps.page import explorer_page
from clearhead.interpret.view.explorer.data import Page
from clearhead.model.facade import Model
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer
from tests.hf_specs import hf_specs
from tests.interpret.view.explorer.browser import Tab, browser
from tests.parity.architectures.harness import Case, all_cases

ARCHITECTURES = sorted(registry.all_families())
TEXT, BLANK, NEW = "the cat", "the ___ sat", 4
LISTED = 12
"""Keys that the matrix lists of a query; no text here is longer, so that it lists them all."""

VISIT = """async ([links, read]) => {
  const { dataset } = document.documentElement;
  const until = async (isDone, pause, what) => {
    for (const start = performance.now(); !(await isDone());) {
      if (performance.now() - start > 60000) throw new Error(what);
      await new Promise(pause);
    }
  };
  const number = (node) => Number(node.textContent.replace("−", "-"));
  // A scratch canvas, since reading the page's own would make the browser warn.
  const scratch = new OffscreenCanvas(61, 61).getContext("2d", { willReadFrequently: true });
  const colors = (canvas) => {
    if (canvas.width < 2 && canvas.height < 2) return 0;
    scratch.clearRect(0, 0, 61, 61);
    scratch.drawImage(canvas, 0, 0, 61, 61);
    return new Set(new Uint32Array(scratch.getImageData(0, 0, 61, 61).data.buffer)).size;
  };
  const all = (selector) => [...document.querySelectorAll(selector)];
  const rows = () => Object.fromEntries(all(".keys tbody tr:not(.sink)").map((row) =>
    [row.querySelector("small").textContent, number(row.querySelector(".number:last-child"))]));
  const steps = () => Object.fromEntries(all("[data-step]").map((step) => [step.dataset.step, number(step)]));
  const canvases = {
    overview: ".head canvas, .preview canvas", matrix: ".heat canvas", lines: ".line-canvas canvas",
    token: ".token-side:first-child .layer-line canvas", alignment: ".heat canvas",
  };
  const counted = {
    heads: ".head", steps: "[data-step]", cells: "td[data-depth]", nodes: ".node", notes: ".pane > .note",
  };
  const readers = {
    matrix: () => ({
      rows: rows(), cell: Number(all(".cell")[0].dataset.value), sink: all("tr.sink .number").map(number),
      facts: all(".facts")[0].textContent,
    }),
    neuron: () => ({ rows: rows(), steps: steps() }),
    token: () => all(".token-side:first-child .look:first-child b").map(number),
    alignment: () => all(".panel tbody .number").map(number),
    painted: async () => {
      const view = document.getElementById("main").dataset.view;
      const found = () => all(canvases[view] ?? "none");
      // What lies below the window is drawn when someone scrolls there.
      const uncover = (canvas) => {
        if (canvas.getBoundingClientRect().top > innerHeight) canvas.scrollIntoView();
        return false;
      };
      scroll(0, 0);
      const isPainted = () => found().every((canvas) => colors(canvas) > 1 || uncover(canvas));
      await until(isPainted, requestAnimationFrame, `${location.hash}: a canvas stays blank`);
      const counts = Object.entries(counted).map(([name, selector]) => [name, all(selector).length]);
      return { view, canvases: found().length, ...Object.fromEntries(counts) };
    },
  };
  const seen = [];
  for (const link of links) {
    if (location.hash !== "#" + link) {
      location.hash = link;
      await new Promise((done) => addEventListener("hashchange", done, { once: true }));
    }
    await until(() => dataset.drawn === dataset.update, setTimeout, `${link} is not drawn`);
    seen.push(await readers[read]());
  }
  return seen;
}"""


@dataclass
class Architecture:
    """A tiny model that has read a text.

    Args:
        place: among the samples of the pages.
        maps: what the page is made of.
        weights: by stack and layer, [heads, queries, keys], of one run with the eager kernel.
    """

    place: int
    maps: AttentionMaps
    weights: dict[tuple[str, int], np.ndarray]

    def link(self, view: str, **state: object) -> str:
        given = {"view": view, "sample": self.place, **state}
        return "&".join(f"{name}={value}" for name, value in given.items())

    def heads(self, most: int) -> list[tuple[str, int, int, int]]:
        """Stack, layer, head and a query of so many heads of each layer, the last among them; queries in turn."""
        places = [
            (stack, layer, head)
            for (stack, layer), found in self.weights.items()
            for head in sorted({len(found) - 1 - place * len(found) // most for place in range(most)})
        ]
        sizes = {stack: found.shape[1] for (stack, _), found in self.weights.items()}
        return [(stack, layer, head, -(at + 1) % sizes[stack]) for at, (stack, layer, head) in enumerate(places)]


def first_cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for case in all_cases():
        found.setdefault(case.model_type, case)
    return found


def peaked(case: Case) -> Transformer:
    """A model whose attention is far from even, and in which no norm is one and no bias is zero."""
    torch.manual_seed(7)
    module = build(hf_specs()[case.name]).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() < 2:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(1.4 * noise * parameter.shape[-1] ** -0.5)
    return module


def eager_weights(maps: AttentionMaps) -> dict[tuple[str, int], np.ndarray]:
    with torch.no_grad(), capture(maps.module, "**.weights") as seen:
        maps.module(maps.reading.source, maps.reading.target, head=False)
    found = {}
    for (stack, layer), record in maps.records.items():
        (weights,) = [one.tensor for one in seen[f"{record.address}.weights"] if one.depth == layer]
        found[stack, layer] = weights[0].numpy()
    return found


def read_by(case: Case, tokenizer: Tokenizer) -> AttentionMaps:
    """The maps of a text: with the mask that an encoder fills, or with what beam search writes."""
    model = Model(peaked(case), TokenizerPair(tokenizer, tokenizer, True), TaskRecord(kind=case.variant.task))
    return model.attention(BLANK) if case.variant.task == "fill" else model.attention(TEXT, generate=NEW, beam_size=2)


@pytest.fixture(scope="module")
def architectures() -> dict[str, Architecture]:
    tokenizer = train_tokenizer("character", ["abcdefghijklmnopqrstuvwxyz .,_'-"], vocab_size=37, mask=True)
    found = {}
    for name, case in sorted(first_cases().items()):
        maps = read_by(case, tokenizer)
        assert tokenizer.vocab_size == maps.module.num_target_ids
        found[name] = Architecture(len(found), maps, eager_weights(maps))
    assert list(found) == ARCHITECTURES
    return found


@pytest.fixture(scope="module")
def page(architectures: dict[str, Architecture]) -> Page:
    return explorer_page("all", [(name, one.maps) for name, one in architectures.items()])


def rounded(page: Page) -> Page:
    """The page as it is for long texts: no head has exact numbers."""
    samples = []
    for sample in page.samples:
        stacks = [
            replace(stack, layers=tuple(replace(layer, exact={}) for layer in stack.layers))
            for stack in sample.attentions
        ]
        samples.append(replace(sample, attentions=tuple(stacks)))
    return replace(page, samples=tuple(samples))


@pytest.fixture(scope="module")
def running(chromium: str) -> Iterator[Any]:
    with browser(chromium) as found:
        yield found


@pytest.fixture(scope="module")
def exact_tab(running: Any, page: Page, tmp_path_factory: pytest.TempPathFactory) -> Tab:
    return Tab(running, page, tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module")
def rounded_tab(running: Any, page: Page, tmp_path_factory: pytest.TempPathFactory) -> Tab:
    return Tab(running, rounded(page), tmp_path_factory.mktemp("rounded"))


@pytest.fixture(params=ARCHITECTURES)
def one(request: pytest.FixtureRequest, architectures: dict[str, Architecture]) -> Architecture:
    return architectures[request.param]


def visit(tab: Tab, links: list[str], read: str) -> list[Any]:
    """Go to each link in turn, and return what is read there; every error that the page reports fails."""
    found: list[Any] = tab.tab.evaluate(VISIT, [links, read])
    assert not tab.errors, tab.errors
    return found


def check_weights(
    tab: Tab, one: Architecture, places: list[tuple[str, int, int, int]], listed: float, cell: float
) -> list[dict[str, Any]]:
    """Hold what the matrix lists of some queries, and one cell of each, against the eager kernel."""
    keys = [int(one.weights[stack, layer][head, query].argmax()) for stack, layer, head, query in places]
    links = [
        one.link("matrix", stack=stack, layer=layer, head=head, query=query, key=key)
        for (stack, layer, head, query), key in zip(places, keys, strict=True)
    ]
    found = visit(tab, links, "matrix")
    for (stack, layer, head, query), key, seen in zip(places, keys, found, strict=True):
        weights = one.weights[stack, layer][head, query]
        assert weights.size <= LISTED
        shown = np.zeros_like(weights)
        shown[list(map(int, seen["rows"]))] = list(seen["rows"].values())
        np.testing.assert_allclose(shown, weights, rtol=0, atol=listed, err_msg=f"{stack} {layer} {head} {query}")
        assert set(map(int, seen["rows"])) == set(np.nonzero(weights)[0].tolist())
        assert seen["cell"] == pytest.approx(weights[key], rel=0, abs=cell)
        if one.maps.record(stack, layer).attention.sink is None:
            assert seen["sink"] == []
        else:
            assert seen["sink"] == [pytest.approx(1 - weights.sum(), rel=0, abs=1e-3)]
    return found


def test_exact_weights_are_those_of_the_eager_kernel(exact_tab: Tab, one: Architecture) -> None:
    places = one.heads(4)
    found = check_weights(exact_tab, one, places, 1e-6, 1e-6)
    for (stack, layer, *_), seen in zip(places, found, strict=True):
        described, facts = one.maps.record(stack, layer).attention.spec, seen["facts"]
        assert "exact (float32)" in facts
        if isinstance(described.mask, spec.Window):
            assert f"window: {described.mask.before} before, {described.mask.after} after" in facts
        assert ("shared by heads" in facts) == (described.num_kv_heads < described.num_heads)
        assert ("sink" in facts) == described.sink
        assert ("score bias" in facts) == (described.score_bias is not None)


def test_rounded_weights_are_those_of_the_eager_kernel(rounded_tab: Tab, one: Architecture) -> None:
    # The list rounds to three digits what is within 0.0005; the cell gives the number itself.
    found = check_weights(rounded_tab, one, one.heads(3), 1e-3, 5e-4)
    assert all("within 0.0005" in seen["facts"] for seen in found)


def test_the_neuron_view_computes_the_weights(exact_tab: Tab, one: Architecture) -> None:
    places = one.heads(1)
    keys = [int(one.weights[stack, layer][head, query].argmax()) for stack, layer, head, query in places]
    links = [
        one.link("neuron", stack=stack, layer=layer, head=head, query=query, key=key)
        for (stack, layer, head, query), key in zip(places, keys, strict=True)
    ]
    for (stack, layer, head, query), key, seen in zip(places, keys, visit(exact_tab, links, "neuron"), strict=True):
        weights, described = one.weights[stack, layer][head, query], one.maps.record(stack, layer).attention.spec
        assert seen["steps"]["softmax"] == pytest.approx(weights[key], rel=0, abs=2e-6)
        shares = np.zeros_like(weights)
        shares[list(map(int, seen["rows"]))] = list(seen["rows"].values())
        np.testing.assert_allclose(shares, weights, rtol=0, atol=6e-6)
        assert ("soft cap" in seen["steps"]) == (described.soft_cap is not None)
        assert ("+ bias" in seen["steps"]) == (described.score_bias is not None)
        assert ("sink" in seen["steps"]) == described.sink


def test_means_of_heads_are_those_of_the_eager_kernel(rounded_tab: Tab, one: Architecture) -> None:
    (stack, _), some = next(iter(one.weights.items()))
    query = some.shape[1] // 2
    means = [found[:, query].mean(axis=0).max() for (name, _), found in one.weights.items() if name == stack]
    if not one.maps.record(stack, 0).attention.spec.sink:  # a sink comes before the keys
        (shown,) = visit(rounded_tab, [one.link("token", stack=stack, query=query)], "token")
        assert shown == pytest.approx(means, rel=0, abs=1e-3)
    layers = [layer for name, layer in one.weights if name == "decoder.memory"]
    links = [one.link("alignment", layer=layer, average="layer") for layer in layers]
    for layer, shown in zip(layers, visit(rounded_tab, links, "alignment"), strict=True):
        expected = one.weights["decoder.memory", layer].mean(axis=0).max(axis=1)
        assert shown == pytest.approx(expected, rel=0, abs=1e-3)


def test_each_view_draws(exact_tab: Tab, one: Architecture) -> None:
    views = ["overview", "matrix", "lines", "token", "neuron", "alignment", "lens", "beams"]
    missing = set()
    if one.maps.target_tokens is None:
        missing.add("alignment")
    if one.maps.module.decoder is None:
        missing.add("beams")
    stack = one.maps.stacks[0]
    links = [one.link(view, stack=stack) for view in views]
    found = {seen["view"]: seen for seen in visit(exact_tab, links, "painted")}
    assert list(found) == views and {view for view in views if found[view]["notes"]} == missing
    first = [weights for (name, _), weights in one.weights.items() if name == stack]
    assert found["overview"]["heads"] == sum(map(len, first)) == found["overview"]["canvases"] - 1
    for view in {"matrix", "lines", "alignment"} - missing:
        assert found[view]["canvases"] == 1, view
    assert found["token"]["canvases"] == len(first)
    assert found["neuron"]["steps"] >= 4
    depths = len(one.maps.layers(one.maps.stacks[-1])) + 1
    assert found["lens"]["cells"] == depths * len(one.maps.target_tokens or one.maps.tokens)
    assert (found["beams"]["nodes"] > NEW) == ("beams" not in missing)
