"""The page that runs a translator in the browser computes what the model computes, and shows every head of it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.apps.demo.translate import RECIPE
from clearhead.interpret.maps.page import SampleOptions
from tests.interpret.view.explorer.browser import browser, layout_faults

ROOT = Path(__file__).resolve().parents[4]
DOCS = ROOT / "docs"
TEXTS = ["5 May 1998", "30 June 2001", "1 March 1950"]
MODULES = ("shared", "browser_page", "check_browser_page")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ch.Model:
    """A translator of the page's spec that has learned for six steps."""
    folder = tmp_path_factory.mktemp("dates")
    pairs = "\n".join(f"{text}\t19{number}-05-05" for number, text in enumerate(TEXTS * 4, 10))
    for name in ("train", "valid"):
        (folder / f"{name}.tsv").write_text(pairs, encoding="utf-8")
    places = {"train": folder / "train.tsv", "valid": folder / "valid.tsv", "run": folder / "run"}
    recipe = RECIPE.format_map({name: json.dumps(str(path)) for name, path in places.items()})
    recipe = recipe.replace("steps = 1000", "steps = 6").replace("warmup = 100", "warmup = 1").replace("keep = 6", "")
    (folder / "run.toml").write_text(recipe, encoding="utf-8")
    ch.train(folder / "run.toml")
    return ch.load(folder / "run")


@pytest.fixture
def page(model: ch.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for folder in (DOCS, DOCS / "_ext", DOCS / "lessons"):
        monkeypatch.syspath_prepend(folder)
    path = tmp_path / "browser.html"
    path.write_text(importlib.import_module("browser_page").page_html(model, TEXTS, "../index.html"), encoding="utf-8")
    yield path
    for name in MODULES:
        sys.modules.pop(name, None)


def test_the_page_computes_what_the_model_computes(model: ch.Model, page: Path, chromium: str) -> None:
    compare = importlib.import_module("check_browser_page").compare
    largest, other = compare(page, model, [*TEXTS, "7 May 1931", "5. Mai"])
    assert 0 < largest < 1e-4 and not other
    assert page.stat().st_size < 2_000_000


NAMES = "alignment", "overview", "matrix", "lines", "token", "neuron", "lens", "beams"
VIEWS = [f"view={name}" for name in NAMES]


@pytest.mark.parametrize("name", ["demo", "browser"])
def test_the_pages_of_the_demo_fit_every_window(
    model: ch.Model, page: Path, chromium: str, tmp_path: Path, screenshots: Path, name: str
) -> None:
    """Both open on the best alignment; the browser page leads back to the site, and says that it is unsure."""
    if name == "demo":
        page = tmp_path / "heads.html"
        model.attention(TEXTS[0], beam_size=2).save_html(page, title="demo", options=SampleOptions(effects=True))
    with browser(chromium) as running:
        tab = running.new_page(viewport={"width": 1440, "height": 900})
        tab.goto(page.as_uri())
        assert tab.locator("nav.views [aria-current]").inner_text() == "Alignment"
        assert tab.locator(".panel .tag").inner_text().startswith("Layer ")
        if name == "browser":
            assert tab.locator(".home a").get_attribute("href") == "../index.html"
            assert "The model is unsure" in tab.locator(".bench-first .fault").inner_text()
        offered = len(tab.locator("nav.views button").all())
        assert offered == (8 if name == "demo" else 7)
        assert not layout_faults(tab, name, screenshots, VIEWS)


def test_a_page_alone_has_no_link_to_a_site(model: ch.Model, page: Path, chromium: str, tmp_path: Path) -> None:
    path = tmp_path / "alone" / "page.html"
    importlib.import_module("browser_page").write_page(model, path)
    with browser(chromium) as running:
        tab = running.new_page()
        tab.goto(path.as_uri())
        assert tab.locator(".bench-first").count() == 1 and not tab.locator(".home").count()


def test_a_head_that_is_switched_off(model: ch.Model, page: Path, chromium: str) -> None:
    """The logits are those of `model.edit`; the explorer shows both, and a text of nothing asks for one."""
    source, target = [*model.tokenizers.source.encode(TEXTS[0]), 3], [2, 5, 6]
    off = torch.ones(1, 4, 1, 1)
    off[:, 2] = 0
    edits = {"decoder.layers.1.steps.1.branches.0.function.mixed": lambda mixed: mixed * off}
    with torch.no_grad(), model.edit(edits):
        wanted = model.module(torch.tensor([source]), torch.tensor([target])).logits[0]
    with browser(chromium) as running:
        tab = running.new_page(viewport={"width": 1440, "height": 900})
        errors: list[str] = []
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto(page.as_uri())
        tab.click('[title="decoder.memory.1.2"]')
        assert tab.get_attribute('[title="decoder.memory.1.2"]', "aria-pressed") == "false"
        read = "([source, target]) => clearhead.translator.read(source, target, clearhead.off).logits"
        weights_read = torch.tensor(tab.evaluate(f"(ids) => ({read})(ids).map((row) => [...row])", [source, target]))
        assert (weights_read - wanted).abs().max() < 1e-4
        assert "without 1 head" in tab.inner_text("main")
        tab.fill("input.date", "")
        assert tab.inner_text(".written-date").startswith("Type a date")
        tab.fill("input.date", TEXTS[1])
        assert f"reads {TEXTS[1]}" in tab.inner_text("#top").replace("\n", " ")
        assert not errors
