"""`clearhead bench`: a table, and JSON with the limit of every speed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clearhead.apps.bench.limits import Limits
from clearhead.apps.cli.main import main
from tests.apps.cli.test_commands import run

Runs = Callable[[str], Path]


@pytest.fixture(autouse=True)
def known_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_limits(device: object, precisions: tuple[str, ...]) -> Limits:
        return Limits(1, 1e10, dict.fromkeys(precisions, 1e11))

    monkeypatch.setattr("clearhead.apps.bench.limits.measure_limits", make_limits)


def test_as_a_table(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    lines = run(capfd, "bench", str(runs("classify")), "--precision", "fp32", "--batch-size", "3").splitlines()
    assert (
        lines[0] == "machine     1 thread: 10.0 GB/s read, 100 GFLOP/s in fp32"
        and "peak of the whole process" in lines[1]
    )
    assert lines[3].split() == [
        "work",
        "precision",
        "batch",
        "context",
        "per",
        "second",
        "limit",
        "share",
        "p50",
        "p95",
    ]
    assert [line.split()[:4] for line in lines[4:6]] == [["encode", "fp32", batch, "25"] for batch in ("1", "3")]
    assert lines[-1].endswith(".") and not lines[-2]


def test_as_json(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    record = json.loads(run(capfd, "bench", str(runs("generate")), "--precision", "fp32", "--json"))
    assert record["device"] == "cpu" and record["limits"]["flops"] == {"fp32": 1e11} and record["peak_memory"] > 1e6
    assert [(speed["work"], speed["batch"], speed["context"]) for speed in record["speeds"]] == [
        ("prompt", 1, 8),
        ("decode", 1, 8),
        ("decode", 16, 8),
    ]
    assert (
        all(speed["share"] == speed["per_second"] / speed["limit"] for speed in record["speeds"]) and record["advice"]
    )


def test_no_model(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", str(tmp_path / "none")]) == 2
    assert "none" in capfd.readouterr().err
