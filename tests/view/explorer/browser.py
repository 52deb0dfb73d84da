"""A page in the real browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clearhead.view.explorer.data import Page
from clearhead.view.explorer.write import write_page

GO = """state => new Promise(done => {
  if (location.hash === "#" + state) return done();
  addEventListener("hashchange", done, { once: true });
  location.hash = state;
})"""
DRAWN = "() => document.documentElement.dataset.drawn === document.documentElement.dataset.update"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


@contextmanager
def browser(chromium: str) -> Iterator[Any]:
    """Headless Chromium, or a skip where playwright is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield running
        running.close()


class Tab:
    """An open page: goes to a state by its link, and fails on every error that the page reports."""

    def __init__(self, tab: Any, page: Page, folder: Path) -> None:
        self.path = folder / "page.html"
        write_page(page, self.path)
        self.tab = tab
        self.errors: list[str] = []
        tab.on("pageerror", lambda error: self.errors.append(str(error)))
        tab.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type in {"error", "warning"} else None,
        )
        tab.on(
            "request",
            lambda request: request.url.startswith(("file:", "data:", "blob:")) or self.errors.append(request.url),
        )
        tab.goto(self.path.as_uri())

    def go(self, state: str) -> Any:
        """Show the state of a link, and return the tab when it is drawn."""
        self.tab.evaluate(GO, state)
        self.tab.wait_for_function(DRAWN)
        assert not self.errors, self.errors
        return self.tab
