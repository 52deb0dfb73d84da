"""The demo "classify": its scores, its picture, and a tiny demo from end to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("babel")

from clearhead.apps.cli.main import main
from clearhead.apps.demo.classify import RECIPE, ClassifySizes, Name, NameSets, confusions, run_classify, score
from clearhead.apps.demo.common import DemoPlan
from clearhead.base.errors import InputError
from clearhead.training.runfile.read import parse_run_file

TINY = (
    *("train.steps=3", "train.warmup=1", "train.validate_every=2", "train.batch_tokens=257", "model.width=16"),
    *("model.heads=2", "model.layers=1", "model.feedforward=23"),
)
SIZES = ClassifySizes(locales=("de", "el", "fi", "ru", "uk"), valid_per_language=5, test_per_language=7)


def four() -> NameSets:
    """Return six test names of three languages, two of them in Latin letters."""
    test = [Name(f"n{n}", language, f"unit {n}") for n, language in enumerate(("A", "A", "B", "B", "C", "C"))]
    return NameSets([], [], test, languages=("A", "B", "C"), latin=("A", "B"), num_shared=0)


def test_the_run_file_trains_an_encoder_of_characters() -> None:
    run = parse_run_file(RECIPE.format(run='"r"', train='"a.tsv"', valid='"b.tsv"'), "recipe")
    assert run.task.kind == "classify" and run.model.family == "encoder" and run.tokenizer.kind == "character"


def test_scores_count_names_and_languages() -> None:
    scores = score(four(), ["A", "B", "B", "B", "C", "A"])
    assert scores.accuracy == pytest.approx(4 / 6)
    assert scores.latin_accuracy == pytest.approx(3 / 4)
    assert scores.per_language == {"A": 0.5, "B": 1.0, "C": 0.5}


def test_without_latin_letters_there_is_no_share_of_them() -> None:
    sets = NameSets([], [], [Name("x", "C", "unit 1")], languages=("C",), latin=(), num_shared=0)
    assert score(sets, ["C"]).latin_accuracy is None


def test_confusions_are_the_errors_by_number() -> None:
    assert confusions(four(), ["B", "B", "B", "A", "C", "C"]) == [("A", "B", 2), ("B", "A", 1)]
    assert confusions(four(), ["A", "A", "B", "B", "C", "C"]) == []


def test_a_tiny_demo_makes_an_ordinary_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    record = run_classify(DemoPlan(run=run, seed=3, batch_size=11, overrides=TINY), SIZES).record
    names = {"German", "Greek", "Finnish", "Russian", "Ukrainian"}
    assert set(record["per_language"]) == names
    assert record["accuracy"] == pytest.approx(sum(record["per_language"].values()) / 5)
    latin = [record["per_language"][name] for name in ("German", "Finnish")]
    assert record["latin_accuracy"] == pytest.approx(sum(latin) / 2)
    json.dumps(record)
    for name in (
        "run.toml",
        "spec.json",
        "task.json",
        "metrics.jsonl",
        "plots/loss.png",
        "plots/confusion.png",
        "plots/heads.html",
    ):
        assert (run / name).stat().st_size > 0, name
    shown = capsys.readouterr().out
    assert "guessing would give 20.0 %" in shown and "in 5 languages" in shown
    assert main(["inspect", str(run)]) == 0


def test_the_parts_on_disk_share_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Enough(Exception):
        pass

    def stop(*_: object) -> None:
        raise Enough

    monkeypatch.setattr("clearhead.apps.demo.classify.train_recipe", stop)
    with pytest.raises(Enough):
        run_classify(DemoPlan(run=tmp_path / "run", seed=3), SIZES)
    parts = {}
    for split in ("train", "valid", "test"):
        lines = (tmp_path / "run" / "data" / f"{split}.tsv").read_text(encoding="utf-8").split("\n")
        assert lines[0] == "text\tlanguage\tnames" and lines[-1] == ""
        rows = [line.split("\t") for line in lines[1:-1]]
        assert all(len(row) == 3 for row in rows)
        parts[split] = {row[0].casefold() for row in rows}
    assert not parts["train"] & parts["test"] and not parts["train"] & parts["valid"]
    assert len(parts["test"]) == 5 * 7


def test_missing_babel_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(InputError, match="which is not installed: install it with "):
        run_classify(DemoPlan(run=tmp_path / "run", seed=1), SIZES)
    assert not (tmp_path / "run").exists()
