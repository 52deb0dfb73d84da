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
    token: ".heat canvas", alignment: ".heat canvas",
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
    token: () => all(".token-side:first-child .look:nth-child(2) b").map(number),
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
    """Tiny model with the attention maps of one text.

    Args:
        place: among the samples of the pages.
        maps: attention maps of the page.
        weights: (stack, layer) -> weights [heads, queries, keys] of one run with the eager kernel.
    """

    number: int
    maps: AttentionMaps
    weights: dict[tuple[str, int], np.ndarray]

    def link(self, view: str, **state: object) -> str:
        settings = {"view": view, "sample": self.number, **state}
        return "&".join(f"{name}={value}" for name, value in settings.items())

    def heads(self, most: int) -> list[tuple[str, int, int, int]]:
        """Return stack, layer, head and query for at most `most` heads of each layer, including the last head."""
        places = [
            (stack, layer, head)
            for (stack, layer), weights in self.weights.items()
            for head in sorted({len(weights) - 1 - step * len(weights) // most for step in range(most)})
        ]
        sizes = {stack: weights.shape[1] for (stack, _), weights in self.weights.items()}
        return [(stack, layer, head, -(at + 1) % sizes[stack]) for at, (stack, layer, head) in enumerate(places)]


def first_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for case in all_cases():
        cases.setdefault(case.model_type, case)
    return cases


def build_peaked(case: Case) -> Transformer:
    """Build a model with peaked attention, in which no norm weight is one and no bias is zero."""
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
        maps.module(maps.inputs.source, maps.inputs.target, head=False)
    weights_by_layer = {}
    for (stack, layer), record in maps.records.items():
        (weights,) = [
            seen_record.tensor for seen_record in seen[f"{record.address}.weights"] if seen_record.depth == layer
        ]
        weights_by_layer[stack, layer] = weights[0].numpy()
    return weights_by_layer


def read_by(case: Case, tokenizer: Tokenizer) -> AttentionMaps:
    """Return the maps of a text: with a mask for an encoder, or with the output of beam search."""
    model = Model(build_peaked(case), TokenizerPair(tokenizer, tokenizer, True), TaskRecord(kind=case.variant.task))
    return model.attention(BLANK) if case.variant.task == "fill" else model.attention(TEXT, generate=NEW, beam_size=2)


@pytest.fixture(scope="module")
def architectures() -> dict[str, Architecture]:
    tokenizer = train_tokenizer("character", ["abcdefghijklmnopqrstuvwxyz .,_'-"], vocab_size=37, mask=True)
    samples = {}
    for name, case in sorted(first_cases().items()):
        maps = read_by(case, tokenizer)
        assert tokenizer.vocab_size == maps.module.num_target_ids
        samples[name] = Architecture(len(samples), maps, eager_weights(maps))
    assert list(samples) == ARCHITECTURES
    return samples


@pytest.fixture(scope="module")
def page(architectures: dict[str, Architecture]) -> Page:
    return explorer_page("all", [(name, architecture.maps) for name, architecture in architectures.items()])


def round_page(page: Page) -> Page:
    """Return the page without exact heads, like the page of a long text."""
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
    with browser(chromium) as chromium_browser:
        yield chromium_browser


@pytest.fixture(scope="module")
def exact_tab(running: Any, page: Page, tmp_path_factory: pytest.TempPathFactory) -> Tab:
    return Tab(running, page, tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module")
def rounded_tab(running: Any, page: Page, tmp_path_factory: pytest.TempPathFactory) -> Tab:
    return Tab(running, round_page(page), tmp_path_factory.mktemp("rounded"))


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest, architectures: dict[str, Architecture]) -> Architecture:
    return architectures[request.param]


def visit(tab: Tab, links: list[str], read: str) -> list[Any]:
    """Go to each link in turn and evaluate `read` there; fail on every error of the page."""
    results: list[Any] = tab.tab.evaluate(VISIT, [links, read])
    assert not tab.errors, tab.errors
    return results


def check_weights(
    tab: Tab, architecture: Architecture, places: list[tuple[str, int, int, int]], listed: float, cell: float
) -> list[dict[str, Any]]:
    """Compare the listed weights of some queries, and one cell of each, with the eager kernel."""
    keys = [int(architecture.weights[stack, layer][head, query].argmax()) for stack, layer, head, query in places]
    links = [
        architecture.link("matrix", stack=stack, layer=layer, head=head, query=query, key=key)
        for (stack, layer, head, query), key in zip(places, keys, strict=True)
    ]
    results = visit(tab, links, "matrix")
    for (stack, layer, head, query), key, seen in zip(places, keys, results, strict=True):
        weights = architecture.weights[stack, layer][head, query]
        assert weights.size <= LISTED
        shown = np.zeros_like(weights)
        shown[list(map(int, seen["rows"]))] = list(seen["rows"].values())
        np.testing.assert_allclose(shown, weights, rtol=0, atol=listed, err_msg=f"{stack} {layer} {head} {query}")
        assert set(map(int, seen["rows"])) == set(np.nonzero(weights)[0].tolist())
        assert seen["cell"] == pytest.approx(weights[key], rel=0, abs=cell)
        if architecture.maps.record(stack, layer).attention.sink is None:
            assert seen["sink"] == []
        else:
            assert seen["sink"] == [pytest.approx(1 - weights.sum(), rel=0, abs=1e-3)]
    return results


def test_exact_weights_are_those_of_the_eager_kernel(exact_tab: Tab, architecture: Architecture) -> None:
    places = architecture.heads(4)
    results = check_weights(exact_tab, architecture, places, 1e-6, 1e-6)
    for (stack, layer, *_), seen in zip(places, results, strict=True):
        described, facts = architecture.maps.record(stack, layer).attention.spec, seen["facts"]
        assert "exact (float32)" in facts
        if isinstance(described.mask, spec.Window):
            assert f"window: {described.mask.before} before, {described.mask.after} after" in facts
        assert ("shared by heads" in facts) == (described.num_kv_heads < described.num_heads)
        assert ("sink" in facts) == described.sink
        assert ("score bias" in facts) == (described.score_bias is not None)


def test_rounded_weights_are_those_of_the_eager_kernel(rounded_tab: Tab, architecture: Architecture) -> None:
    # The list rounds to three digits what is within 0.0005; the cell gives the number itself.
    results = check_weights(rounded_tab, architecture, architecture.heads(3), 1e-3, 5e-4)
    assert all("within 0.0005" in seen["facts"] for seen in results)


def test_the_neuron_view_computes_the_weights(exact_tab: Tab, architecture: Architecture) -> None:
    places = architecture.heads(1)
    keys = [int(architecture.weights[stack, layer][head, query].argmax()) for stack, layer, head, query in places]
    links = [
        architecture.link("neuron", stack=stack, layer=layer, head=head, query=query, key=key)
        for (stack, layer, head, query), key in zip(places, keys, strict=True)
    ]
    for (stack, layer, head, query), key, seen in zip(places, keys, visit(exact_tab, links, "neuron"), strict=True):
        weights, described = (
            architecture.weights[stack, layer][head, query],
            architecture.maps.record(stack, layer).attention.spec,
        )
        assert seen["steps"]["softmax"] == pytest.approx(weights[key], rel=0, abs=2e-6)
        shares = np.zeros_like(weights)
        shares[list(map(int, seen["rows"]))] = list(seen["rows"].values())
        np.testing.assert_allclose(shares, weights, rtol=0, atol=6e-6)
        assert ("soft cap" in seen["steps"]) == (described.soft_cap is not None)
        assert ("+ bias" in seen["steps"]) == (described.score_bias is not None)
        assert ("sink" in seen["steps"]) == described.sink


def test_means_of_heads_are_those_of_the_eager_kernel(rounded_tab: Tab, architecture: Architecture) -> None:
    (stack, _), some = next(iter(architecture.weights.items()))
    query = some.shape[1] // 2
    means = [
        weights_HQK[:, query].mean(axis=0).max()
        for (name, _), weights_HQK in architecture.weights.items()
        if name == stack
    ]
    if not architecture.maps.record(stack, 0).attention.spec.sink:  # a sink comes before the keys
        (shown,) = visit(rounded_tab, [architecture.link("token", stack=stack, query=query)], "token")
        assert shown == pytest.approx(means, rel=0, abs=1e-3)
    layers = [layer for name, layer in architecture.weights if name == "decoder.memory"]
    links = [architecture.link("alignment", layer=layer, average="layer") for layer in layers]
    for layer, shown in zip(layers, visit(rounded_tab, links, "alignment"), strict=True):
        expected = architecture.weights["decoder.memory", layer].mean(axis=0).max(axis=1)
        assert shown == pytest.approx(expected, rel=0, abs=1e-3)


def test_each_view_draws(exact_tab: Tab, architecture: Architecture) -> None:
    views = ["overview", "matrix", "lines", "token", "neuron", "alignment", "lens", "beams"]
    missing = set()
    if architecture.maps.target_tokens is None:
        missing.add("alignment")
    if architecture.maps.module.decoder is None:
        missing.add("beams")
    stack = architecture.maps.stacks[0]
    links = [architecture.link(view, stack=stack) for view in views]
    results = {seen["view"]: seen for seen in visit(exact_tab, links, "painted")}
    assert list(results) == views and {view for view in views if results[view]["notes"]} == missing
    first = [weights for (name, _), weights in architecture.weights.items() if name == stack]
    assert results["overview"]["heads"] == sum(map(len, first)) == results["overview"]["canvases"] - 1
    for view in {"matrix", "lines", "alignment"} - missing:
        assert results[view]["canvases"] == 1, view
    assert results["token"]["canvases"] == 2
    assert results["neuron"]["steps"] >= 4
    depths = len(architecture.maps.layers(architecture.maps.stacks[-1])) + 1
    assert results["lens"]["cells"] == depths * len(architecture.maps.target_tokens or architecture.maps.tokens)
    assert (results["beams"]["nodes"] > NEW) == ("beams" not in missing)
