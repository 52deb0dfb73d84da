"""The demo "translate": its scores, and a tiny demo from end to end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("babel")

from clearhead.apps.cli.main import main
from clearhead.apps.demo.common import DemoPlan
from clearhead.apps.demo.translate import DatePair, TranslateSizes, exact_match, run_translate, score_table

TINY = ("train.steps=3", "train.warmup=1", "train.validate_every=2", "train.batch_tokens=311", "model.width=16")
SIZES = TranslateSizes(locales=("de", "fa", "ja"), train_size=211, valid_per_locale=5, test_per_locale=7)


def test_exact_match_counts_by_locale() -> None:
    pairs = [DatePair("a", "1901-02-03", "fa"), DatePair("b", "1901-02-04", "de"), DatePair("c", "1901-02-05", "fa")]
    assert exact_match(pairs, ["1901-02-03", "1901-02-04", "1901-02-06"]) == {"de": 1.0, "fa": 0.5}


def test_the_table_names_every_locale_and_the_lowest() -> None:
    console = Console(width=100, record=True, file=None, quiet=True)
    console.quiet = False
    with console.capture() as shown:
        console.print(score_table({"de": 1.0, "fa": 0.75, "ja": 0.9}, 60))
    text = shown.get()
    for locale, language, share in [("de", "German", "100.0"), ("fa", "Persian", "75.0"), ("ja", "Japanese", "90.0")]:
        assert re.search(rf"{locale}\W+{language}\W+{share} %", text), text
    assert "lowest: fa 75.0 %" in text
    assert "88.33 %" in text


def test_a_tiny_demo_makes_an_ordinary_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    outcome = run_translate(DemoPlan(run=run, seed=3, overrides=TINY), SIZES)
    exact = outcome.record["per_locale"]
    assert set(exact) == set(SIZES.locales)
    assert outcome.record["exact_match"] == pytest.approx(sum(exact.values()) / 3)
    for name in ("run.toml", "spec.json", "metrics.jsonl", "plots/loss.png", "plots/alignment.png", "plots/heads.html"):
        assert (run / name).stat().st_size > 0, name
    page = (run / "plots" / "heads.html").read_text("utf-8")
    assert '"name":"effect"' in page and "decoder.memory" in page
    dates = {
        split: {
            line.split("\t")[1] for line in (run / "data" / f"{split}.tsv").read_text(encoding="utf-8").splitlines()
        }
        for split in ("train", "valid", "test")
    }
    assert (
        not dates["train"] & dates["test"]
        and not dates["train"] & dates["valid"]
        and not dates["valid"] & dates["test"]
    )
    assert main(["inspect", str(run)]) == 0
