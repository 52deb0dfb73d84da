"""Variations from words, files and dictionaries, and their faults, which are reported before any run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.apps.sweeps.variations import Variation, parse_values, parse_variation, read_sweep_file, run_names
from clearhead.base.errors import InputError
from tests.apps.cli.tiny_run import write_run_file


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pre,post", ["pre", "post"]),
        ("1..3", [1, 2, 3]),
        ("-1..1", [-1, 0, 1]),
        ("1e-3, 5e-4", [1e-3, 5e-4]),
        ("true,false", [True, False]),
        ("[[0.9, 0.98], [0.9, 0.999]]", [[0.9, 0.98], [0.9, 0.999]]),
        ('"a,b"', ['"a', 'b"']),
        ('["a,b"]', ["a,b"]),
        ("", []),
    ],
)
def test_values(text: str, expected: list[Any]) -> None:
    assert list(parse_values("model.key", text)) == expected


def test_every_value_meets_every_other_and_seeds_turn_fastest() -> None:
    variation, equal = parse_variation(["train.seed=1..2", "model.norm_place=pre,post"])
    runs = variation.configurations()
    assert equal is None and [tuple(run.values()) for run in runs] == [("pre", 1), ("pre", 2), ("post", 1), ("post", 2)]
    assert run_names(runs) == [
        f"norm_place={norm_place}-seed{seed}" for norm_place in ("pre", "post") for seed in (1, 2)
    ]


def test_names_are_files_of_their_own() -> None:
    runs = [{"model.dropout": 0.1, "lora.dropout": 0.2}, {"data.train.text": "a/b c"}, {"data.train.text": "a/b:c"}, {}]
    assert run_names(runs) == ["model.dropout=0.1-lora.dropout=0.2", "text=a_b_c", "text=a_b_c-3", "as-it-is"]


@pytest.mark.parametrize(
    "variation",
    [
        Variation({"model.norm_place": ["pre", "post"], "train.betas": [[0.9, 0.98]], "train.seed": [1, 2]}),
        Variation({}, [{"model.width": 14, "model.heads": 2}, {"model.width": 22}]),
    ],
)
def test_a_file_says_what_was_varied(tmp_path: Path, variation: Variation) -> None:
    (tmp_path / "sweep.toml").write_text(variation.to_toml("tokens"), encoding="utf-8")
    again, equal = read_sweep_file(tmp_path / "sweep.toml")
    assert (again.configurations(), equal) == (variation.configurations(), "tokens")


GRID = [f"--sweep={key}=1..100" for key in ("train.seed", "train.steps")]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--sweep", "model.norm_plac=pre,post"], "unknown key 'norm_plac' in [model] (did you mean 'norm_place'?)"),
        (["--sweep", "norm_place=pre"], "the key needs the name of its table; did you mean model.norm_place?"),
        (["--sweep", "model.layers="], "model.layers has no values: give some"),
        (["--sweep", "model.layers=1,,2"], "has an empty value: remove the extra comma"),
        (["--sweep", "train.seed=3..1"], "train.seed=3..1 is a reversed range: write 1..3"),
        (["--sweep", "train.seed=1..10000000000"], "has 10,000,000,000 values, but a sweep has at most 256 runs"),
        (GRID, "the sweep has 10,000 runs, but at most 256 are allowed: vary fewer keys"),
        (["--sweep", "model.layers=1,1"], "the sweep has model.layers=1 twice: name each run once"),
        (["--sweep", "train.seed=1", "--sweep", "train.seed=2"], "train.seed is swept twice"),
        (["--sweep", "train.seed=1..2", "--seed", "3"], "train.seed is both swept and set for all runs"),
        (["--sweep", "model.layers=[1,"], "is not a TOML list"),
        (["--sweep", "model.positions"], "such as train.seed=1..3, or one sweep file; 'model.positions' has no values"),
        (["--sweep", "none.toml"], "none.toml: there is no such sweep file"),
        (["--sweep", "model.layers=1,2", "--sweep", "x"], "--sweep expects KEY=VALUES, such as train.seed=1..3"),
        (["--sweep", "model.heads=2,3"], "heads must divide the width: 14 is not a multiple of 3"),
        (["--sweep", "train.run=a,b"], "train.run cannot vary in a sweep, since each run gets a directory inside it"),
        (["--sweep", "train.steps=5,6"], "train.steps cannot vary in a sweep: all runs share one budget"),
        (["--sweep", "model.layers=1,2", "--equal", "token"], "got 'token' (did you mean 'tokens'?)"),
        (["--sweep", "model.layers=1,2", "--equal", "seconds"], "equal seconds need the time"),
        (["--sweep", "model.layers=1,2", "train.epochs=2"], "equal steps need the number of steps"),
        (["--sweep", "model.layers=1,2", "train.seconds=9"], "train.seconds may end runs early"),
        (["--sweep", "model.width=14,28", "--equal", "parameters"], "model.width cannot vary at equal parameters"),
        (["--equal", "tokens"], "--equal has no effect without --sweep"),
        (["--sweep", "model.layers=1,2", "--resume"], "holds no sweep to resume: start it without --resume"),
        (["--sweep", "model.layers=1,2", "train.run={}"], "is not empty: name a new directory for the sweep"),
    ],
)
def test_mistakes(tmp_path: Path, words: list[str], expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(["train", str(file), *(word.format(tmp_path) for word in words)]) == 2
    captured = capfd.readouterr()
    assert expected in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert sorted(tmp_path.iterdir()) == before, "nothing is written"


@pytest.mark.parametrize(
    ("vary", "expected"),
    [
        ({}, "the sweep varies no key"),
        ([], "the sweep varies no key"),
        ([1], "`vary` must be a mapping of keys to values"),
        ({"train.seed": 1}, "train.seed: expected a list of values, got 1"),
        ({"model.norm_place": "pre"}, "model.norm_place: expected a list of values, got 'pre'"),
        ({"model.norm_place": [None]}, "expected a number, a text or a list as a value, got None"),
    ],
)
def test_mistakes_in_python(tmp_path: Path, vary: Any, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        ch.sweep(write_run_file(tmp_path), vary)
