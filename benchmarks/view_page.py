"""Page of the attention explorer in headless Chromium: file size, time to open, and frame times.

    python benchmarks/view_page.py

The page has 12 layers of 12 heads (GPT-2 124M) with random queries and keys. They are scaled until the attention is as
peaked as in trained models: the strongest key gets half of a query's attention on average. "Opens" is the time from the
request of the file until all visible thumbnails are drawn. The page measures its frame times while the pointer moves
over heads and cells, the matrix is zoomed and panned, and pages are scrolled.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from pairing import Spread
from playwright.sync_api import sync_playwright

from clearhead.interpret.view.explorer.data import (
    ExactHead,
    HeadColumn,
    LayerAttention,
    Page,
    Sample,
    StackAttention,
    TokenRow,
)
from clearhead.interpret.view.explorer.write import write_page

LAYERS = HEADS = 12
HEAD_SIZE = 64
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
DRAWN = """() => {
  const cards = [...document.querySelectorAll(".head")];
  const seen = cards.filter(card => card.getBoundingClientRect().top < innerHeight);
  return seen.length > 0 && seen.every(card => card.querySelector("canvas").width > 1) && performance.now();
}"""


def make_layer(layer: int, tokens: int, rng: np.random.Generator, exact: int | None) -> LayerAttention:
    """Return a layer of causal heads whose strongest key gets half of the attention on average."""
    mask = np.tril(np.ones((tokens, tokens), bool))
    queries, keys = rng.normal(size=(2, HEADS, tokens, HEAD_SIZE)).astype(np.float32)
    scale = 0.1

    def weights() -> np.ndarray:
        scores = np.where(mask, queries @ keys.transpose(0, 2, 1) * scale, -np.inf)
        shares = np.exp(scores - scores.max(axis=2, keepdims=True))
        return (shares / shares.sum(axis=2, keepdims=True)).astype(np.float32)

    while weights().max(axis=2).mean() < 0.5:
        scale *= 1.2
    heads = {} if exact is None else {exact: ExactHead(queries[exact], keys[exact], scale)}
    values = {"strongest": weights().max(axis=2).mean(axis=1)}
    return LayerAttention(layer, tuple(range(HEADS)), HEADS, HEADS, weights, mask, "causal", exact=heads, values=values)


def make_page(tokens: int) -> Page:
    rng = np.random.default_rng(0)
    texts = tuple(f" word{index % 97}" for index in range(tokens))
    row = TokenRow(texts, texts, np.arange(tokens))
    layers = tuple(make_layer(layer, tokens, rng, 0 if layer == 0 else None) for layer in range(LAYERS))
    stack = StackAttention("decoder.self", "decoder", "decoder", layers)
    column = HeadColumn("strongest", "strongest", "The share of the strongest key, on average over queries.")
    return Page("12 layers of 12 heads", (Sample("random", {"decoder": row}, (stack,), (column,)),))


def go(tab: Any, view: str) -> None:
    tab.evaluate("state => { location.hash = state; }", f"view={view}")
    tab.wait_for_timeout(700)
    tab.evaluate("() => { clearheadFrames.length = 0; }")


def frame_times(tab: Any, kind: str) -> dict[str, float]:
    frames = np.array(tab.evaluate("() => clearheadFrames.slice()"))
    return {
        "kind": kind,
        "frames": len(frames),
        "median": float(np.median(frames)),
        "p95": float(np.quantile(frames, 0.95)),
    }


def hover(tab: Any, selector: str, steps: int) -> None:
    box = tab.locator(selector).first.bounding_box()
    for step in range(steps):
        share = step / steps
        x, y = (
            box["x"] + box["width"] * (0.15 + 0.7 * share),
            box["y"] + min(box["height"], 600) * (0.3 + 0.5 * (share * 7 % 1)),
        )
        tab.mouse.move(x, y)
        tab.wait_for_timeout(12)


def wheel(tab: Any, dx: float, dy: float, steps: int) -> None:
    for _ in range(steps):
        tab.mouse.wheel(dx, dy)
        tab.wait_for_timeout(12)


def smoothness(tab: Any) -> list[dict[str, float]]:
    """Yield the frame times of typical pointer movements in four views."""
    results = []
    go(tab, "overview")
    hover(tab, ".board", 120)
    results.append(frame_times(tab, "overview, hover"))
    go(tab, "overview&sort=strongest")
    wheel(tab, 0, 60, 40)
    wheel(tab, 0, -60, 40)
    results.append(frame_times(tab, "overview, scroll"))
    go(tab, "matrix&layer=3&head=5")
    hover(tab, ".heat", 160)
    results.append(frame_times(tab, "matrix, hover"))
    go(tab, "matrix&layer=3&head=4")
    tab.keyboard.down("Control")
    wheel(tab, 0, -30, 40)
    tab.keyboard.up("Control")
    wheel(tab, 20, 30, 40)
    tab.keyboard.down("Control")
    wheel(tab, 0, 30, 40)
    tab.keyboard.up("Control")
    results.append(frame_times(tab, "matrix, zoom and pan"))
    go(tab, "lines&layer=3&head=5")
    hover(tab, ".line-tokens.left", 100)
    results.append(frame_times(tab, "lines, hover"))
    wheel(tab, 0, 80, 60)
    results.append(frame_times(tab, "lines, hover and scroll"))
    go(tab, "token&query=60")
    wheel(tab, 0, 60, 30)
    hover(tab, ".layer-lines", 60)
    results.append(frame_times(tab, "token, scroll and hover"))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[100, 300])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        parser.error("chromium is not on PATH: install it")
    results = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        for tokens in args.tokens:
            page, path = make_page(tokens), Path(folder) / f"{tokens}.html"
            start = time.perf_counter()
            write_page(page, path)
            seconds = time.perf_counter() - start
            opened = []
            for turn in range(args.rounds):
                tab = browser.new_page(viewport={"width": 1440, "height": 900})
                tab.goto(path.as_uri(), wait_until="commit")
                opened.append(tab.wait_for_function(DRAWN, polling="raf").json_value() / 1000)
                if turn < args.rounds - 1:
                    tab.close()
            results.append({
                "tokens": tokens, "megabytes": path.stat().st_size / 1e6, "write": seconds, "opens": opened,
                "frames": smoothness(tab),
            })  # fmt: skip
            tab.close()
    if args.json:
        print(json.dumps(results))
        return
    print(f"{platform.machine()}, Python {platform.python_version()}")
    for result in results:
        print(f"\n{result['tokens']} tokens: {result['megabytes']:.2f} MB, written in {result['write']:.2f} s, "
              f"opens in {Spread.of(result['opens'])} s")  # fmt: skip
        for row in result["frames"]:
            times = f"median {row['median']:5.1f} ms, 95 % within {row['p95']:5.1f} ms"
            print(f"  {row['kind']:26} {row['frames']:5} frames, {times}")


if __name__ == "__main__":
    main()
