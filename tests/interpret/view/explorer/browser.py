"""Open a page in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
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
