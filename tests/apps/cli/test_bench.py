"""`clearhead bench`: a table, and JSON with the limit of every speed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clearhead.apps.bench.limits import Limits
from clearhead.apps.cli.main import main
from clearhead.base.errors import LackOfMemory
from clearhead.fast.stored import INT8, choose_formats
from clearhead.model import loading
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


@pytest.mark.parametrize("reason", ["too few matrices", "no kernels", "too little memory"])
def test_precisions_that_cannot_be_measured_are_named_with_the_reason(
    runs: Runs, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """The rows of the tiny model are no multiples of 32 weights."""
    expected = "int4 is left out: precision int4 needs 75% of the layers' weights in 4 bits"
    if reason == "no kernels":
        monkeypatch.setenv("CLEARHEAD_KERNELS", "plain")
        expected = "int8 and int4 are left out: there are no compiled kernels"
    elif reason == "too little memory":
        monkeypatch.setattr(loading, "choose_int4", refuse_with_lack_of_memory)
        expected = "int4 is left out: no memory"
    assert main(["bench", str(runs("classify")), "--json"]) == 0
    shown = capfd.readouterr()
    assert expected in shown.err
    measured = {speed["precision"] for speed in json.loads(shown.out.splitlines()[-1])["speeds"]}
    assert "fp32" in measured and "int4" not in measured and ("int8" in measured) == (reason != "no kernels")


def test_int4_is_measured_where_the_model_and_the_machine_support_it(
    runs: Runs, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "choose_int4", lambda module: choose_formats(module, INT8))
    record = json.loads(run(capfd, "bench", str(runs("classify")), "--json"))
    assert [speed["precision"] for speed in record["speeds"]][-2:] == ["int4", "int4"]
    assert record["limits"]["flops"]["int4"]


def refuse_with_lack_of_memory(module: object) -> None:
    raise LackOfMemory("no memory")
