"""The page file loads nothing, runs no code of a text, is accessible, and works in a notebook."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clearhead.base.errors import InputError
from clearhead.interpret.view.explorer.data import Page, TokenRow
from clearhead.interpret.view.explorer.write import frame_html, page_html, write_page
from tests.conftest import ROOT
from tests.interpret.view.explorer import examples
from tests.interpret.view.explorer.browser import Tab, browser

VIEWS = ["overview", "matrix", "lines", "token", "neuron", "alignment", "lens", "beams"]
HOSTILE = [
    "</script><script>hacked = 1</script>", "<img src=x onerror='hacked = 1'>", "<!--", "]]>", "<script>", "--!>",
    '"><svg onload=hacked=1>', "{{ script }}", "<!-- data -->", "\u2028\u2029", "\ud800", "\x00", "&lt;b&gt;",
    "javascript:hacked=1", "\u202eevil\u2066", "';hacked=1;//", "\\u003cscript>", "\n", "", " ", "\u200b",
]  # fmt: skip


@pytest.fixture(scope="module")
def running(chromium: str) -> Iterator[Any]:
    with browser(chromium) as chromium_browser:
        yield chromium_browser


@pytest.fixture(scope="module")
def translator(running: Any, tmp_path_factory: pytest.TempPathFactory) -> Tab:
    return Tab(running, examples.translation_page(), tmp_path_factory.mktemp("translator"), width=390)


def hostile_page(texts: list[str]) -> Page:
    """Return a page in which every text is one of `texts`."""
    next_text = iter(texts * 1000)
    page = examples.translation_page()
    (sample,) = page.samples
    rows = {}
    for name, row in sample.rows.items():
        size = len(row.texts)
        rows[name] = TokenRow(
            tuple(next(next_text) for _ in range(size)),
            tuple(next(next_text) for _ in range(size)),
            row.words,
            row.is_generated,
        )
    attentions = tuple(
        dataclasses.replace(
            stack,
            measure=next(next_text),
            layers=tuple(
                dataclasses.replace(
                    layer,
                    mask_name=next(next_text),
                    score_bias=next(next_text),
                    patterns=tuple(next(next_text) for _ in layer.heads),
                )
                for layer in stack.layers
            ),
        )
        for stack in sample.attentions
    )
    columns = tuple(
        dataclasses.replace(column, title=next(next_text), description=next(next_text)) for column in sample.columns
    )
    assert sample.lens is not None
    lens = dataclasses.replace(
        sample.lens, vocabulary=tuple(next(next_text) for _ in sample.lens.vocabulary),
        layers=tuple(next(next_text) for _ in sample.lens.layers),
    )  # fmt: skip
    beams = tuple(dataclasses.replace(node, token=next(next_text), reason=next(next_text)) for node in sample.beams)
    changed = dataclasses.replace(
        sample, label=next(next_text), rows=rows, attentions=attentions, columns=columns, lens=lens, beams=beams,
        facts=((next(next_text), next(next_text)),),
    )  # fmt: skip
    return Page(
        texts[0],
        (changed, dataclasses.replace(changed, label=next(next_text))),
        facts=((next(next_text), next(next_text)),),
    )


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=12)), min_size=9, max_size=60))
def test_no_text_becomes_markup_or_script(running: Any, tmp_path: Path, texts: list[str]) -> None:
    shown = Tab(running, hostile_page(texts), tmp_path)
    for view in VIEWS:
        tab = shown.go(f"view={view}&other=1&query=2&key=1&join=1")
        assert tab.evaluate("() => typeof hacked") == "undefined"
        assert tab.locator("img, svg, iframe, object, embed, a, body script[src]").count() == 0
        assert tab.locator("script:not([type])").count() == 0
    # Versions of playwright differ in what they make of a lone surrogate.
    heading = tab.evaluate("() => document.querySelector('h1').textContent")
    assert heading.replace("\ud800", "\ufffd") == texts[0].replace("\ud800", "\ufffd")
    shown.tab.close()


def test_no_text_leaves_its_json() -> None:
    page = hostile_page(HOSTILE)
    text = page_html(page)
    assert text.isascii() or not any(text_of in text for text_of in HOSTILE if "<" in text_of and "data" not in text_of)
    stored = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert stored is not None
    assert not re.search("[<>&\u2028\u2029]", stored[1])
    assert json.loads(stored[1])["title"] == HOSTILE[0]


def test_the_policy_admits_nothing_but_the_own_script_and_style() -> None:
    text = page_html(examples.translation_page())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert re.fullmatch(
        r"default-src 'none'; script-src 'sha256-[^']*'; style-src 'sha256-[^']*'; img-src data: blob:; "
        r"base-uri 'none'; form-action 'none'",
        policy[1],
    )
    assert not re.search(r"https?://(?!www\.w3\.org)", text)


def test_the_same_input_makes_the_same_file(tmp_path: Path) -> None:
    for name in ("one.html", "two.html"):
        write_page(examples.decoder_page(13), tmp_path / "new" / name)
    first_bytes, second_bytes = ((tmp_path / "new" / name).read_bytes() for name in ("one.html", "two.html"))
    assert first_bytes == second_bytes == page_html(examples.decoder_page(13)).encode("utf-8")


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_page(examples.decoder_page(7, layers=1, heads=3, exact=()), blocker / "page.html")
    page = examples.decoder_page(7, layers=2, heads=3, exact=())

    def fail() -> np.ndarray:
        raise RuntimeError("stopped")

    (stack,) = page.samples[0].attentions
    layers = (stack.layers[0], dataclasses.replace(stack.layers[1], weights=fail))
    sample = dataclasses.replace(page.samples[0], attentions=(dataclasses.replace(stack, layers=layers),))
    old = tmp_path / "page.html"
    old.write_text("before")
    with pytest.raises(RuntimeError, match="stopped"):
        write_page(dataclasses.replace(page, samples=(sample,)), old)
    assert old.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "page.html"]


@pytest.mark.parametrize("tokens", [100, 300])
def test_the_file_of_a_twelve_layer_model_is_small(tokens: int) -> None:
    page = examples.decoder_page(tokens, layers=12, heads=12, exact=())
    assert len(page_html(page)) <= {100: 1.6e6, 300: 9e6}[tokens]


def test_the_page_works_in_the_frame_of_a_notebook(running: Any, tmp_path: Path) -> None:
    frame = frame_html(examples.translation_page(), height=640)
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><title>notebook</title><p>cell</p>{frame}", encoding="utf-8")
    tab = running.new_page()
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(path.as_uri())
    inner = tab.frame_locator("iframe")
    for name in ("Matrix", "Lines", "Beams", "Overview"):
        inner.get_by_role("button", name=name, exact=True).click()
        inner.locator(f'main[data-view="{name.lower()}"] .pane').wait_for()
    inner.locator(".head canvas").first.wait_for()
    assert not errors
    tab.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_no_violation(translator: Tab, view: str, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    tab = translator.go(f"view={view}&query=2&key=1&sort=entropy&stack=decoder.memory")
    tab.emulate_media(color_scheme=theme)
    results = axe.Axe().run(tab)
    assert results.violations_count == 0, results.generate_report()


@pytest.mark.parametrize("view", VIEWS)
def test_no_view_is_wider_than_a_phone(translator: Tab, view: str) -> None:
    tab = translator.go(f"view={view}&query=2&key=1")
    assert tab.evaluate("() => document.documentElement.scrollWidth") <= 390


def test_help_is_accessible(translator: Tab) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    tab = translator.go("view=overview")
    tab.keyboard.press("?")
    results = axe.Axe().run(tab)
    tab.keyboard.press("Escape")
    assert results.violations_count == 0, results.generate_report()


def test_the_modules_are_typed(tmp_path: Path) -> None:
    compiler = shutil.which("tsc")
    if compiler is None:
        pytest.skip("no tsc on this machine: npm install --global typescript")
    # Those of the site's page that runs a model are next to the explorer's in that page.
    for folder in (ROOT / "clearhead" / "interpret" / "view" / "explorer" / "page", ROOT / "docs" / "browser"):
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    options = "--checkJs --allowJs --strict --noEmit --noUnusedLocals --target es2022 --module es2022".split()
    options += ["--lib", "es2022,dom,dom.iterable"]
    files = [str(tmp_path / name) for name in ("app.js", "live.js", "page.js")]
    done = subprocess.run([compiler, *options, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
