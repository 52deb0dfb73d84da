"""The demo's own parts: what it refuses, where it writes, how it counts; and one tiny demo from end to end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from rich.console import Console

pytest.importorskip("babel")

from clearhead.cli import demo as demos
from clearhead.cli.demo import DemoPlan, exact_match, free_folder, run_demo, score_table
from clearhead.cli.main import main, make_app
from clearhead.data.dates import DatePair
from clearhead.errors import InputError

TINY = ("train.steps=3", "train.warmup=1", "train.validate_every=2", "train.batch_tokens=311", "model.width=16")
LOCALES = ("de", "fa", "ja")


def tiny(run: Path) -> DemoPlan:
    return DemoPlan(
        run=run, seed=3, locales=LOCALES, train_size=211, valid_per_locale=5, test_per_locale=7, overrides=TINY
    )


def test_options_are_these() -> None:
    command = dict(typer.main.get_command(make_app()).commands)["demo"]  # type: ignore[attr-defined]
    options = {opt for one in command.params if one.param_type_name == "option" for opt in one.opts} - {"--help", "-h"}
    assert options == {"--out", "--json", "--device", "--precision", "--threads", "--batch-size", "--seed"}
    assert [one.name for one in command.params if one.param_type_name == "argument"] == ["kind"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("generate", "the demo 'generate' is not there yet"), ("translat", "did you mean 'translate'?")],
)
def test_other_kinds_are_refused(kind: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", kind]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert expected in captured.err and captured.err.count("\n") == 1


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("precious", encoding="utf-8")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "is not an empty folder; name a new one with --out" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_next_free_name_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for expected in ("runs/demo", "runs/demo-2", "runs/demo-3"):
        folder = free_folder(None)
        assert folder == Path(expected)
        folder.mkdir(parents=True)
    with pytest.raises(InputError, match="not an empty folder"):
        free_folder(Path("runs"))


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
    exact = run_demo(tiny(run))
    assert set(exact) == set(LOCALES)
    for name in ("run.toml", "spec.json", "metrics.jsonl", "plots/loss.png", "plots/alignment.png", "data/test.tsv"):
        assert (run / name).stat().st_size > 0, name
    dates = {
        part: {line.split("\t")[1] for line in (run / "data" / f"{part}.tsv").read_text(encoding="utf-8").splitlines()}
        for part in ("train", "valid", "test")
    }
    assert (
        not dates["train"] & dates["test"]
        and not dates["train"] & dates["valid"]
        and not dates["valid"] & dates["test"]
    )
    assert main(["inspect", str(run)]) == 0


def test_json_ends_with_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[DemoPlan] = []

    def quick(plan: DemoPlan, **_: object) -> dict[str, float]:
        seen.append(plan)
        return {"de": 1.0, "fa": 0.5}

    monkeypatch.setattr(demos, "run_demo", quick)
    run = tmp_path / "run"
    assert main(["demo", "--json", "--out", str(run), "--seed", "7", "--threads", "1"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record == {
        "exact_match": 0.75,
        "per_locale": {"de": 1.0, "fa": 0.5},
        "seconds": record["seconds"],
        "run": str(run),
    }
    assert seen[0].seed == 7
    assert seen[0].overrides == ["train.threads=1"]
