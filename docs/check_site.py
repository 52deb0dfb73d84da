"""Look at every page of the built site in Chromium, opened from disk: python docs/check_site.py build/site [PAGE ...].

A page passes if it opens within two seconds, without the network and without an error. It is no wider than a telephone,
and axe finds no violation in light or dark. The search must find a word of the pages; llms.txt must list every page.
On the pages of `LAYOUT`, no text is below 12 pixels and no element is cut off, on four screens in light and dark.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

SECONDS = 2.0
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
# Pages of clearhead within a lesson are checked by other tests.
AXE = {"resultTypes": ["violations"], "iframes": False}
RULES = {**AXE, "rules": {"color-contrast": {"enabled": False}}}
CONTRAST = {**AXE, "runOnly": {"type": "rule", "values": ["color-contrast"]}}
# For the contrast, one text of each colour, background and font is enough: all of a long page take a minute.
LOOK = """async ([rules, contrast]) => {
  const texts = new Map(), words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (words.nextNode()) {
    const element = words.currentNode.parentElement, style = getComputedStyle(element);
    if (!words.currentNode.data.trim() || !element.checkVisibility()) continue;
    let behind = element;
    while (behind && getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
    const colours = [style.color, behind && getComputedStyle(behind).backgroundColor];
    texts.set([...colours, style.fontSize, style.fontWeight].join(), element);
  }
  const results = rules ? [await axe.run(rules)] : [];
  if (texts.size) results.push(await axe.run({ include: [...texts.values()] }, contrast));
  return results.flatMap((result) => result.violations);
}"""
LAYOUT = (
    "index.html",
    "guides/index.html",
    "lessons/03_attention.html",
    "reference/command-line.html",
    "reference/commands/train.html",
)
SCREENS = (NARROW, {"width": 768, "height": 1024}, WIDE, {"width": 1920, "height": 1080})
# These scroll sideways on purpose: code, but not outputs of lessons; tables; formulas.
SCROLLS = ":not(.output) > .highlight pre, .pst-scrollable-table-container, .formula"
# A text one pixel wide is for screen readers.
MEASURE = """(scrolls) => {
  const faults = new Set(), words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const name = (element) => `${element.tagName}.${element.className} "${element.textContent.trim().slice(0, 20)}"`;
  for (const element of document.body.querySelectorAll(":not(svg *)")) {
    const isCut = element.clientWidth > 1 && element.scrollWidth > element.clientWidth && element.checkVisibility();
    if (isCut && !element.closest(scrolls))
      faults.add(`${element.scrollWidth} > ${element.clientWidth} pixels: ${name(element)}`);
  }
  while (words.nextNode()) {
    const element = words.currentNode.parentElement;
    const size = parseFloat(getComputedStyle(element).fontSize);
    if (words.currentNode.data.trim() && size < 12 && element.checkVisibility())
      faults.add(`text of ${size} pixels: ${name(element)}`);
  }
  return [...faults];
}"""


def violations(page: Page, rules: dict[str, object] | None, mode: str) -> Iterator[str]:
    """Yield each violation that axe finds on the visible page.

    Args:
        page: the page, with axe loaded.
        rules: the options of axe for all rules but contrast; None means that only the contrast is checked.
        mode: the colours, "light" or "dark".
    """
    for violation in page.evaluate(LOOK, [rules, CONTRAST]):
        nodes = "; ".join(f"{node['target']} {node['failureSummary']}" for node in violation["nodes"][:3])
        count = len(violation["nodes"])
        yield f"{mode}: {violation['id']} ({count} places): {' '.join(nodes.split())}"


def layout_faults(page: Page) -> Iterator[str]:
    """Yield each element of an open page that is cut off or has small text, with the screen and the colours."""
    for screen in SCREENS:
        page.set_viewport_size(screen)
        for mode in ("light", "dark"):
            page.evaluate("(mode) => { document.documentElement.dataset.theme = mode; }", mode)
            for fault in page.evaluate(MEASURE, SCROLLS):
                yield f"{screen['width']} x {screen['height']}, {mode}: {fault}"


def faults_of(browser: Browser, path: Path) -> Iterator[str]:
    """Yield the faults of a page."""
    context = browser.new_context(viewport=WIDE, color_scheme="light", reduced_motion="reduce")
    page, errors, urls = context.new_page(), list[str](), list[str]()
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: urls.append(request.url))
    page.on("requestfailed", lambda request: errors.append(f"{request.url} cannot be read"))
    begin = time.monotonic()
    page.goto(path.as_uri(), wait_until="load")
    seconds = time.monotonic() - begin
    if seconds > SECONDS:
        yield f"opens in {seconds:.1f} s"
    yield from errors
    yield from (f"asks for {url}" for url in urls if not url.startswith(("file:", "data:", "blob:", "about:")))
    page.evaluate(Axe().axe_script)
    yield from violations(page, RULES, "light")
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    yield from violations(page, None, "dark")
    if path.as_posix().endswith(LAYOUT):
        yield from layout_faults(page)
    page.set_viewport_size(NARROW)
    width = page.evaluate("document.documentElement.scrollWidth")
    if width > NARROW["width"]:
        yield f"is {width} pixels wide at {NARROW['width']}"
    context.close()


def search_faults(browser: Browser, site: Path) -> Iterator[str]:
    """Yield the faults of the search, opened from disk."""
    page = browser.new_page()
    page.goto(f"{(site / 'search.html').as_uri()}?q=attention")
    page.wait_for_selector("ul.search li a", timeout=10_000)
    if page.locator("ul.search li a").count() < 3:
        yield "finds fewer than three pages on attention"


def llms_faults(site: Path) -> Iterator[str]:
    """Yield the pages that llms.txt does not list, and its links to missing pages."""
    listed = set(re.findall(r"\]\(([^)]+\.html)\)", (site / "llms.txt").read_text("utf-8")))
    for folder in ("start", "guides", "lessons", "explanation", "coming-from"):
        pages = {path.relative_to(site).as_posix() for path in (site / folder).glob("*.html")}
        yield from (f"does not list {page}" for page in sorted(pages - listed - {"start/browser.html"}))
    yield from (f"links to {page}, which is missing" for page in sorted(listed) if not (site / page).exists())


def main(site: Path, names: list[str]) -> int:
    """Check the pages of a site, or those that are named; return 1 if one has a fault."""
    pages = sorted(site / name for name in names) or sorted(site.rglob("*.html"))
    pages = [page for page in pages if not {"_static", "_downloads", "_sources"} & set(page.parts)]
    begin, faults = time.monotonic(), 0
    with sync_playwright() as playwright:
        names = "chromium", "chromium-browser", "google-chrome"
        program = next(filter(None, map(shutil.which, names)), None)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for path in pages:
            for fault in faults_of(browser, path):
                faults += 1
                print(f"{path.relative_to(site)}: {fault}")
        for name, listing in (("search.html", search_faults(browser, site)), ("llms.txt", llms_faults(site))):
            for fault in listing:
                faults += 1
                print(f"{name}: {fault}")
        browser.close()
    print(f"{len(pages)} pages looked at in {time.monotonic() - begin:.0f} s, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
