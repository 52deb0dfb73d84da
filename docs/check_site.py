"""Look at every page of the built site in Chromium, opened from disk: python docs/check_site.py build/site [PAGE ...].

A page passes if it is there within two seconds, asks for nothing from a network, reports no error, is no wider than a
telephone, and axe finds no violation in light or dark. The search must find a word of the pages.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

SECONDS = 2.0
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
# Pages of the product that a lesson shows are checked by tests of their own.
AXE = {"resultTypes": ["violations"], "iframes": False}
CONTRAST = {**AXE, "runOnly": {"type": "rule", "values": ["color-contrast"]}}


def violations(page: Page, options: dict[str, object], mode: str) -> Iterator[str]:
    """Yield what axe finds on a page as it is shown."""
    for violation in Axe().run(page, options=options).response["violations"]:
        places = "; ".join(f"{place['target']} {place['failureSummary']}" for place in violation["nodes"][:3])
        count = len(violation["nodes"])
        yield f"{mode}: {violation['id']} ({count} places): {' '.join(places.split())}"


def faults_of(browser: Browser, path: Path) -> Iterator[str]:
    """Yield what is wrong with a page."""
    context = browser.new_context(viewport=WIDE, color_scheme="light", reduced_motion="reduce")
    page, said, asked = context.new_page(), list[str](), list[str]()
    page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.on("requestfailed", lambda request: said.append(f"{request.url} cannot be read"))
    begin = time.monotonic()
    page.goto(path.as_uri(), wait_until="load")
    seconds = time.monotonic() - begin
    if seconds > SECONDS:
        yield f"opens in {seconds:.1f} s"
    yield from said
    yield from (f"asks for {url}" for url in asked if not url.startswith(("file:", "data:", "blob:", "about:")))
    yield from violations(page, AXE, "light")
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    yield from violations(page, CONTRAST, "dark")
    page.set_viewport_size(NARROW)
    width = page.evaluate("document.documentElement.scrollWidth")
    if width > NARROW["width"]:
        yield f"is {width} pixels wide at {NARROW['width']}"
    context.close()


def search_faults(browser: Browser, site: Path) -> Iterator[str]:
    """Yield what is wrong with the search from disk."""
    page = browser.new_page()
    page.goto(f"{(site / 'search.html').as_uri()}?q=attention")
    page.wait_for_selector("ul.search li a", timeout=10_000)
    if page.locator("ul.search li a").count() < 3:
        yield "finds fewer than three pages on attention"


def main(site: Path, names: list[str]) -> int:
    """Check the pages of a site, or those that are named; return 1 if one has a fault."""
    pages = sorted(site / name for name in names) or sorted(site.rglob("*.html"))
    pages = [page for page in pages if not {"_static", "_downloads", "_sources"} & set(page.parts)]
    begin, faults = time.monotonic(), 0
    with sync_playwright() as playwright:
        names = "chromium", "chromium-browser", "google-chrome"
        found = next(filter(None, map(shutil.which, names)), None)
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for path in pages:
            for fault in faults_of(browser, path):
                faults += 1
                print(f"{path.relative_to(site)}: {fault}")
        for fault in search_faults(browser, site):
            faults += 1
            print(f"search.html: {fault}")
        browser.close()
    print(f"{len(pages)} pages looked at in {time.monotonic() - begin:.0f} s, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
