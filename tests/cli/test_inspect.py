"""`clearhead inspect` says what a model was trained for, what its head does, and what its decoder sees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_commands import run

Runs = Callable[[str], Path]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("classify", ["classify, on texts of at most 16 tokens", "one of 2: early, late", "pool mean, linear 14"]),
        ("pair", ["classify, on pairs of texts"]),
        ("number", ["a number", "linear 1"]),
        ("several", ["several of 2: a, m"]),
        ("embed", ["embed, on texts", "pool mean, l2_normalize"]),
        ("generate", ["generate, on texts", "causal, in the decoder", "FLOPs for a token", "cache"]),
        ("denoise", ["denoise, on texts", "causal, in the decoder", "for each source token"]),
    ],
)
def test_purpose(kind: str, expected: list[str], runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    out = run(capfd, "inspect", str(runs(kind)))
    assert all(words in out for words in expected), out
    assert ("mask  " in out) == ("cache  " in out) == (kind in ("generate", "denoise"))


def test_json(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    found = runs("classify")
    record = json.loads(run(capfd, "inspect", str(found), "--json"))
    assert record["task"]["kind"] == "classify" and record["task"]["labels"] == ["early", "late"]
    assert record["head"] == "pool mean, linear 14, activation tanh, linear 2" and record["masks"] == []
    assert json.loads(run(capfd, "inspect", str(runs("generate")), "--json"))["masks"] == ["causal"]


def test_a_spec_that_stands_alone_has_no_task(runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    alone = tmp_path / "spec.json"
    alone.write_bytes((runs("classify") / "spec.json").read_bytes())
    assert json.loads(run(capfd, "inspect", str(alone), "--json"))["task"] is None
    assert "task  " not in run(capfd, "inspect", str(alone))
