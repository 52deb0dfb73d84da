"""A live page of a long text: how soon its first layer is drawn, and how soon a tile comes, in headless Chromium.

    python benchmarks/live_page.py

The model is a decoder with RoPE (llama-tiny: 5 layers of 8 heads, random weights), the text has 16,000 words, each a
token. "Page" is the time from the request of the page until its heads have places, "first layer" until all maps of that
layer are drawn. A tile of 512 x 512 weights is asked for 30 times by HTTP, at random places of random heads, while the
other layers of the overview are computed, and again when nothing else is.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import threading
import time
import urllib.parse
import urllib.request
from typing import Any

import torch
import uvicorn
from pairing import Spread
from playwright.sync_api import sync_playwright

from clearhead import presets
from clearhead.apps.serve.explorer import explorer_router, listen, make_app
from clearhead.apps.serve.gate import Access
from clearhead.apps.serve.page_computations import PageRequest, Runs
from clearhead.apps.serve.work import Workers
from clearhead.core import build
from clearhead.model.facade import Model
from clearhead.spec.tasks.record import TaskRecord
from clearhead.text.pair import TokenizerPair
from clearhead.text.tokenizer_training import train_tokenizer

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
WORDS = 500
LAYERS, HEADS = 5, 8
CARDS = "() => document.querySelectorAll('.head').length > 0 && performance.now()"
DRAWN = """heads => {
  const cards = [...document.querySelectorAll(".head")].slice(0, heads);
  return cards.length === heads && cards.every(card => card.querySelector("canvas").width > 1) && performance.now();
}"""


def model() -> Model:
    torch.manual_seed(0)
    tokenizer = train_tokenizer("split", [" ".join(f"w{number}" for number in range(WORDS))], vocab_size=WORDS + 4)
    hparams = presets.llama_tiny(vocab_size=tokenizer.vocab_size, layers=LAYERS)
    return Model(build(hparams).eval(), TokenizerPair(tokenizer, tokenizer, True), TaskRecord(kind="generate"))


def tile_seconds(address: str, name: str, tokens: int, count: int) -> list[float]:
    seconds, draw = [], random.Random(0)
    for _ in range(count):
        row = draw.randrange(tokens // 512)
        query = {
            "stack": "decoder.self", "layer": draw.randrange(LAYERS), "head": draw.randrange(HEADS), "row": row,
            "column": draw.randrange(row + 1),
        }  # fmt: skip
        start = time.perf_counter()
        with urllib.request.urlopen(f"{address}tile/{name}?{urllib.parse.urlencode(query)}") as answer:
            answer.read()
        seconds.append(time.perf_counter() - start)
    return seconds


def measure_page(address: str, page_request: PageRequest, tokens: int, executable: str | None) -> dict[str, Any]:
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=executable, args=ARGUMENTS)
        tab = browser.new_page(viewport={"width": 1440, "height": 900})
        tab.goto(address, wait_until="commit")
        page = tab.wait_for_function(CARDS, timeout=120_000).json_value()
        first = tab.wait_for_function(DRAWN, arg=HEADS, timeout=120_000).json_value()
        beside = tile_seconds(address, page_request.name, tokens, 30)
        every = tab.wait_for_function(DRAWN, arg=HEADS * LAYERS, timeout=240_000).json_value()
        alone = tile_seconds(address, page_request.name, tokens, 30)
        browser.close()
    milliseconds = {"alone": alone, "beside the overview": beside}
    return {
        "page_s": page / 1000, "first_layer_s": first / 1000, "all_layers_s": every / 1000,
        **{f"tile_ms {name}": str(Spread.of([1000 * tile_time for tile_time in times])) for name, times in milliseconds.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_000)
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser; else playwright's")
    options = parser.parse_args()
    tokens, chromium = options.tokens, options.chromium
    text = " ".join(f"w{index * index % WORDS}" for index in range(tokens))
    listener, workers = listen(0), Workers()
    access, page_request = Access.of_page(listener.getsockname()[1]), PageRequest(text=text)
    app = make_app(access, workers, [explorer_router(Runs(model(), "long text", {}), workers, page_request)])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        results = measure_page(access.address, page_request, tokens, chromium)
    finally:
        server.should_exit = True
        thread.join()
    print(json.dumps({"tokens": tokens, "python": platform.python_version(), "torch": torch.__version__, **results}))


if __name__ == "__main__":
    main()
