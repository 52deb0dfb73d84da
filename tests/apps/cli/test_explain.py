"""`clearhead explain`: text in 80 columns, JSON with the numbers of a capture, a page that loads nothing, bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import clearhead as ch
from clearhead.apps.cli.main import main

TEXT = "a m u"


@pytest.mark.parametrize("kind", ["translate", "generate", "fill", "classify"])
def test_text_is_readable_at_80_columns(
    kind: str, trained: Path, runs: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    run = trained / "run" if kind == "translate" else runs(kind)
    capfd.readouterr()
    assert main(["explain", str(run), TEXT]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    # Each step, with the lines that compute it.
    for words in ("embedding", "query, head 0", "weights, head 0", "why ", "what wrote the key", "probabilities"):
        assert words in text
    for path, first in re.findall(r"(clearhead/core/\w+\.py):(\d+)-\d+", text):
        source = Path(ch.__file__).parents[1] / path
        assert re.match(r"\s*(def|@)", source.read_text("utf-8").splitlines()[int(first) - 1])


def test_json_has_the_numbers_of_a_capture(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = str(trained / "run")
    options = ["--target", "u a", "--stack", "encoder", "--head", "1", "--token", "0"]
    assert main(["explain", run, TEXT, *options, "--json"]) == 0
    record = json.loads(capfd.readouterr().out.splitlines()[-1])
    model = ch.load(run, precision="fp32")
    maps = model.attention(TEXT, "u a")
    with ch.capture(maps.module, "encoder.layers.0.**") as seen:
        maps.module(maps.inputs.source, maps.inputs.target)
    compared = 0
    for value in record["values"]:
        if value["address"] in seen:
            numbers = seen.tensor(value["address"])[0]
            row = numbers[1, 0] if len(value["shape"]) == 3 and numbers.dim() == 3 else numbers[0]
            compared += numbers.dim() == 2 and value["name"] not in ("query", "key", "value")
            if numbers.dim() == 3 or value["name"] not in ("query", "key", "value"):
                assert value["numbers"] == pytest.approx(row.tolist(), rel=1e-5, abs=1e-6)
    assert compared > 5
    (score,) = record["scores"]
    assert sum(value for *_, value in score["pairs"]) + score["bias"] == pytest.approx(score["score"], abs=1e-4)
    weights = next(value["numbers"] for value in record["values"] if value["name"] == "weights")
    assert score["key"] == weights.index(max(weights))


def test_a_page_loads_nothing_and_shows_a_text_as_text(trained: Path, tmp_path: Path) -> None:
    page = tmp_path / "deep" / "page.html"
    assert main(["explain", str(trained / "run"), "a <b>m</b> u", "-o", str(page)]) == 0
    text = page.read_text("utf-8")
    assert "default-src &#x27;none&#x27;" in text
    assert "<script" not in text and "http" not in text.replace("http-equiv", "")
    assert "<b>m</b>" not in text and "&lt;b&gt;m&lt;/b&gt;" in text
    assert " style=" not in text, "the policy lets no element have a style attribute"
    assert text.count("<details") == text.count("</details>")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--layer", "7"], "--layer is 7, but the decoder has layers 0 to "),
        (["--head", "9"], "--head is 9, but the decoder has heads 0 to "),
        (["--token", "99"], "--token is 99, but the decoder reads tokens 0 to "),
        (["--stack", "both"], "--stack is 'both', but this model has encoder and decoder"),
        (["-o", "page.pdf"], "-o page.pdf is not an HTML page"),
        (["--force"], "--force has no effect without -o"),
    ],
)
def test_wrong_options_are_one_sentence(
    options: list[str], sentence: str, trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(trained / "run"), TEXT, *options]) == 2
    assert sentence in capfd.readouterr().err


def test_an_existing_page_is_kept(trained: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine", encoding="utf-8")
    assert main(["explain", str(trained / "run"), TEXT, "-o", str(page)]) == 2
    assert page.read_text("utf-8") == "mine"
