"""Open a page in a real browser."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clearhead.interpret.view.explorer.data import Page
from clearhead.interpret.view.explorer.write import write_page

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
GO = """state => new Promise(done => {
  if (location.hash === "#" + state) return done();
  addEventListener("hashchange", done, { once: true });
  location.hash = state;
})"""
DRAWN = "() => document.documentElement.dataset.drawn === document.documentElement.dataset.update"

SIZES = {"phone": (390, 844), "tablet": (768, 1024), "desk": (1440, 900), "wide": (1920, 1080)}
"""Name -> width and height of a window, in CSS pixels."""
HIGHEST = 420
"""Largest distance of the picture from the top of a window of 1440 x 900, in CSS pixels."""
SCROLLS = (".columns", ".neuron-keys", ".python", ".unseen", "select", "input", "textarea")
"""Elements that scroll on purpose, or are not seen."""
SHORTENS = (".line-tokens button", ".lens th, .lens td", ".node", ".node .token-text", ".layer-name small")
"""Elements that end in an ellipsis where a text is long."""
FAULTS = """([ignored, isDesk, highest]) => {
  const faults = [];
  const name = (element) => `${element.tagName.toLowerCase()}.${element.className}`;
  const tab = document.querySelector("nav.views [aria-current]").getBoundingClientRect();
  if (tab.left < 0 || tab.right > innerWidth) faults.push("the active tab is outside the window");
  if (document.documentElement.scrollWidth > innerWidth) faults.push("the page is wider than the window");
  const { top } = document.querySelector("main .pane > :not(h2)").getBoundingClientRect();
  if (isDesk && top + scrollY > highest) faults.push(`the picture begins at ${top + scrollY}`);
  for (const element of document.querySelectorAll("body *")) {
    const isBox = element.clientWidth > 0 && !["inline", "none"].includes(getComputedStyle(element).display);
    const isCut = isBox && element.scrollWidth > element.clientWidth + 1 && !element.matches(ignored);
    if (isCut) faults.push(`${name(element)} is cut`);
  }
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    const { parentElement: element } = text;
    const isShown = text.data.trim() && element.getClientRects().length && !element.closest("script, .thumbs, .unseen");
    const isSmall = isShown && parseFloat(getComputedStyle(element).fontSize) < 12;
    if (isSmall) faults.push(`small text in ${name(element)}: ${text.data}`);
  }
  for (const row of document.querySelectorAll(".bench-row")) {
    const shown = [...row.children].filter((child) => child.getClientRects().length);
    const isAlone = shown.length === 1 && shown[0].matches("button, select, .field");
    const tops = shown.map((child) => child.getBoundingClientRect().top);
    if (isAlone) faults.push("a control stands alone in a row");
    if (Math.max(...tops) - Math.min(...tops) > 30) faults.push("a row of controls is broken");
  }
  return [...new Set(faults)];
}"""
SETTLED = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def layout_faults(tab: Any, title: str, folder: Path, views: Sequence[str] = ("",)) -> list[str]:
    """Look at a page at four sizes, light and dark; return what is cut, too small, too low or inaccessible.

    Args:
        tab: the page.
        title: name of the screenshots.
        folder: folder of the screenshots, one for each size and theme.
        views: states of the page to look at; the first one is checked in both themes, and by axe.
    """
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    faults = []
    for number, (size, (width, height)) in enumerate(SIZES.items()):
        tab.set_viewport_size({"width": width, "height": height})
        for theme in ("dark", "light") if number % 2 else ("light", "dark"):
            tab.emulate_media(color_scheme=theme)
            for view in reversed(views if theme == "light" else views[:1]):
                if view:
                    tab.evaluate(GO, view)
                tab.evaluate(SETTLED)
                tab.wait_for_function(DRAWN)
                settings = [", ".join([*SCROLLS, *SHORTENS]), size == "desk", HIGHEST]
                faults += [f"{title} {view} {size} {theme}: {fault}" for fault in tab.evaluate(FAULTS, settings)]
            tab.screenshot(path=folder / f"{title}-{size}-{theme}.png")
        results = axe.Axe().run(tab)
        for violation in results.response["violations"]:
            targets = ", ".join(str(node["target"]) for node in violation["nodes"][:3])
            faults.append(f"{title} {size} {theme}: {violation['help']}: {targets}")
    return faults


@contextmanager
def browser(chromium: str) -> Iterator[Any]:
    """Start headless Chromium; skip the test if playwright is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield running
        running.close()


class Tab:
    """Open page that can go to a state by its link, and fails on every error of the page."""

    def __init__(self, running: Any, page: Page, folder: Path, *, width: int = 1440) -> None:
        self.path = folder / "page.html"
        write_page(page, self.path)
        self.tab = running.new_page(viewport={"width": width, "height": 900})
        self.errors: list[str] = []
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("console", lambda message: self.note(message.type in {"error", "warning"}, message.text))
        self.tab.on("request", lambda request: self.note(not request.url.startswith("file:"), request.url))
        self.tab.goto(self.path.as_uri())

    def note(self, is_error: bool, text: str) -> None:
        if is_error:
            self.errors.append(text)

    def go(self, state: str) -> Any:
        """Show the state of a link, and return the tab when it is drawn."""
        self.tab.evaluate(GO, state)
        return self.wait_until_drawn()

    def wait_until_drawn(self) -> Any:
        """Wait until the tab shows its state, and return it."""
        self.tab.wait_for_function(DRAWN)
        assert not self.errors, self.errors
        return self.tab

    def texts(self, selector: str) -> list[str]:
        """Return the text of every element that a selector matches."""
        contents: list[str] = self.tab.locator(selector).all_inner_texts()
        return contents

    def numbers(self, selector: str) -> list[float]:
        return [float(text.replace("−", "-")) for text in self.texts(selector)]
