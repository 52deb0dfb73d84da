"""`clearhead heads`: the numbers of `Model.heads` as a table or as JSON, sorted, for every family."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.interpret.maps.head_statistics import STATISTICS
from tests.hf_models import language_model

TEXTS = ["a m u", "", "e q y b n"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return path


def test_json_has_the_numbers_of_python(trained: Path, texts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    targets = texts.with_name("targets.txt")
    targets.write_text("u a\n\nb e\n", encoding="utf-8")
    run = str(trained / "run")
    assert main(["heads", run, str(texts), "--target", str(targets), "--json"]) == 0
    record = json.loads(capfd.readouterr().out.splitlines()[-1])
    rows = ch.load(run).heads([TEXTS[0], TEXTS[2]], ["u a", "b e"])
    assert record["texts"] == 2
    assert record["heads"] == json.loads(json.dumps([asdict(row) for row in rows]))
    assert main(["heads", run, str(texts), "--sort", "entropy", "--seed", "3", "--json"]) == 0
    sorted_rows = json.loads(capfd.readouterr().out.splitlines()[-1])["heads"]
    values = [row["entropy"] for row in sorted_rows]
    assert values == sorted(values, reverse=True)
    generated = ch.load(run).heads([TEXTS[0], TEXTS[2]], seed=3)
    assert {row["entropy"] for row in sorted_rows} == {row.entropy for row in generated}


@pytest.mark.parametrize("kind", ["generate", "fill", "classify"])
def test_the_table_has_a_row_for_each_head(
    kind: str, runs: Callable[[str], Path], texts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = str(runs(kind))
    capfd.readouterr()
    assert main(["heads", run, str(texts)]) == 0
    out = capfd.readouterr().out.splitlines()
    header, *lines = [line for line in out if line.strip() and not set(line) <= set("─ ")]
    assert header.split() == [
        "stack",
        "layer",
        "head",
        *(name.removesuffix("_token") for name in STATISTICS),
        "patterns",
    ]
    rows = ch.load(run).heads([TEXTS[0], TEXTS[2]])
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        cells = line.split()
        assert cells[:3] == [row.stack, str(row.layer), str(row.head)]
        assert cells[3] == f"{row.entropy:.2f}±{row.spread['entropy']:.2f}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sort", "entrpy"], "--sort expects a column, got 'entrpy' (did you mean 'entropy'?)"),
        (["--batch-size", "3"], "--batch-size has no effect"),
        (["--target", "TARGETS"], "has 3 lines, but"),
        (["--pair"], "texts.txt:1: expected two texts with one tab between them"),
        (["--from", "de"], "one pair of languages"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], message: str, trained: Path, texts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    targets = texts.with_name("targets.txt")
    targets.write_text("u a\n", encoding="utf-8")
    words = [str(targets) if word == "TARGETS" else word for word in arguments]
    assert main(["heads", str(trained / "run"), str(texts), *words]) == 2
    captured = capfd.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_a_text_that_is_too_long_is_named_by_its_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = language_model(tmp_path / "model")
    path = tmp_path / "long.txt"
    path.write_text("a\n\n" + "a " * 400 + "\n", encoding="utf-8")
    assert main(["heads", str(run), str(path)]) == 2
    assert "long.txt:3: the text has" in capfd.readouterr().err
    path.write_text("\n\n")
    assert main(["heads", str(run), str(path)]) == 2
    assert "the file has no text" in capfd.readouterr().err
