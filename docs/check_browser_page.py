"""Compare the browser page with the model that it contains: python docs/check_browser_page.py PAGE.

On 200 random dates the logits of each token must agree within 1e-4, and so must the translations by three beams.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

import clearhead
from clearhead.apps.demo.translate import make_date_sets

sys.path.append(str(Path(__file__).resolve().parent / "lessons"))

import shared

DATES, BEAMS, LIMIT, APART = 200, 3, 20, 1e-4
RUN = """([texts, beams, limit]) => texts.map((text) => {
  const { translator } = clearhead;
  const [best] = translator.translate(text, beams, new Set(), limit).results;
  const source = translator.encode(text);
  const { logits } = translator.read(source, best.ids.slice(0, -1));
  return { source, target: best.ids, written: translator.decode(best.ids), logits: logits.map((row) => [...row]) };
})"""


@torch.no_grad()
def compare(path: Path, model: clearhead.Model, texts: list[str]) -> tuple[float, list[str]]:
    """Return the largest difference of a logit, and the texts with different translations.

    Args:
        path: the page.
        model: the model that the page contains.
        texts: the texts to translate.
    """
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(path.resolve().as_uri())
        runs = page.evaluate(RUN, [texts, BEAMS, LIMIT])
        browser.close()
    largest = 0.0
    for run in runs:
        logits = model.module(torch.tensor([run["source"]]), torch.tensor([run["target"][:-1]])).logits[0]
        largest = max(largest, float((logits.double() - torch.tensor(run["logits"], dtype=torch.float64)).abs().max()))
    ours = model.translate(texts, beam_size=BEAMS, max_length=LIMIT)
    return largest, [text for text, run, wanted in zip(texts, runs, ours, strict=True) if run["written"] != wanted]


def main(path: Path) -> int:
    """Compare on dates that are drawn now; return 1 if they differ."""
    seed = time.time_ns() % 2**32
    drawn = make_date_sets(seed=seed, train_size=0, valid_per_locale=0, test_per_locale=DATES).test
    texts = [pair.source for pair in drawn[:: max(1, len(drawn) // DATES)]][:DATES]
    largest, other = compare(path, shared.dates_model(), texts)
    print(f"{len(texts)} dates of seed {seed}: logits differ by {largest:.1e} at most, {len(other)} texts are others")
    return int(largest > APART or bool(other))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
