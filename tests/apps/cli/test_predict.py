"""`clearhead predict` and `Model.predict` give what the commands and methods of each task give."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clearhead
from clearhead.apps.cli.main import main

TEXTS = ["abc cab", "bca"]
OWN: dict[str, Callable[[clearhead.Model], Any]] = {
    "denoise": lambda model: model.translate(TEXTS),
    "fill": lambda model: model.fill(["abc ___", "___ a"]),
    "classify": lambda model: model.classify(TEXTS),
    "tag": lambda model: model.tag(TEXTS),
    "embed": lambda model: model.embed(TEXTS),
    "answer": lambda model: [model.answer("abc", text)[0] for text in TEXTS],
}


@pytest.mark.parametrize("kind", OWN)
def test_every_task_predicts(kind: str, runs: Callable[[str], Path]) -> None:
    model = clearhead.load(f"{runs(kind)}@last")
    texts: Any = {"fill": ["abc ___", "___ a"], "answer": [("abc", text) for text in TEXTS]}.get(kind, TEXTS)
    for answers, expected in (
        (model.predict(texts), OWN[kind](model)),
        (model.predict(texts[0]), model.predict(texts[:1])[0]),
    ):
        assert np.array_equal(answers, expected) if kind == "embed" else answers == expected


@pytest.mark.parametrize("kind", ["classify", "tag", "embed"])
def test_the_command_writes_a_prediction_for_each_line(
    kind: str, runs: Callable[[str], Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = f"{runs(kind)}@last"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{TEXTS[0]}\n\n{TEXTS[1]}\n".encode())))
    assert main(["predict", run, "--json"]) == 0
    first, empty, last = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    assert (first["text"], empty["prediction"], last["text"]) == (TEXTS[0], None, TEXTS[1])
    expected = clearhead.load(run).predict(TEXTS)
    if kind == "embed":
        assert np.allclose(first["prediction"], expected[0], atol=1e-6)
    elif kind == "classify":
        assert first["prediction"]["label"] == expected[0].label
    else:
        assert [prediction["label"] for prediction in first["prediction"]] == [
            prediction.label for prediction in expected[0]
        ]


@pytest.mark.parametrize(("kind", "shown"), [("classify", "label"), ("denoise", ""), ("embed", "")])
def test_a_line_of_text_is_the_label_the_text_or_the_numbers(
    kind: str,
    shown: str,
    runs: Callable[[str], Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = f"{runs(kind)}@last"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{TEXTS[0]}\n\n".encode())))
    assert main(["predict", run]) == 0
    line, empty = capfd.readouterr().out.splitlines()
    expected = clearhead.load(run).predict(TEXTS[0])
    assert empty == ""
    if kind == "embed":
        assert np.allclose([float(number) for number in line.split("\t")], expected, rtol=1e-4, atol=1e-6)
    else:
        assert line == (getattr(expected, shown) if shown else expected)
