"""The command `clearhead demo`: its refusals, its run directory, and its last messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

pytest.importorskip("babel")

from clearhead.apps.cli import demo as demos
from clearhead.apps.cli.main import main, make_app
from clearhead.apps.demo.common import DemoOutcome, DemoPlan, free_folder, results_console
from clearhead.base.errors import InputError


def test_options_are_these() -> None:
    command = dict(typer.main.get_command(make_app()).commands)["demo"]  # type: ignore[attr-defined]
    options = {
        opt for parameter in command.params if parameter.param_type_name == "option" for opt in parameter.opts
    } - {"--help", "-h"}
    assert options == {"--out", "--json", "--device", "--precision", "--threads", "--batch-size", "--seed"}
    assert [parameter.name for parameter in command.params if parameter.param_type_name == "argument"] == ["kind"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("translat", "unknown demo 'translat' (did you mean 'translate'?)"),
        ("tag", "expected one of translate, generate, fill, classify"),
    ],
)
def test_other_kinds_are_refused(kind: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", kind]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert expected in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize(("option", "value"), [("--device", "cuda:99"), ("--precision", "fp8")])
def test_a_wrong_option_leaves_no_data(
    option: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "fill", option, value]) == 2
    assert value in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", demos.KINDS)
def test_a_folder_in_use_is_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("precious", encoding="utf-8")
    assert main(["demo", kind, "--out", str(tmp_path)]) == 2
    assert "is not an empty folder: choose another with --out" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_next_free_name_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for expected in ("runs/demo-fill", "runs/demo-fill-2", "runs/demo-fill-3"):
        folder = free_folder(None, Path("runs/demo-fill"))
        assert folder == Path(expected)
        folder.mkdir(parents=True)
    with pytest.raises(InputError, match="not an empty folder"):
        free_folder(Path("runs"), Path("runs/demo-fill"))


def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, DemoPlan]]:
    """Replace every demo by a quick one, and return the recorded calls."""
    calls: list[tuple[str, DemoPlan]] = []

    def stand_in(kind: str) -> None:
        def run(plan: DemoPlan) -> DemoOutcome:
            calls.append((kind, plan))
            plan.run.mkdir(parents=True)
            (plan.run / "there.png").touch()
            (plan.run / "plots").mkdir()
            (plan.run / "plots" / "heads.html").touch()
            return DemoOutcome(
                record={"kind": kind},
                pictures={"Seen": "there.png", "Unseen": "gone.png"},
                commands={"Go on": "clearhead x"},
            )

        monkeypatch.setattr(f"clearhead.apps.demo.{kind}.run_{kind}", run)

    for kind in demos.KINDS:
        stand_in(kind)
    return calls


def test_each_kind_has_its_demo_and_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = stand_ins(monkeypatch)
    for words in ([], ["generate"], ["classify"], ["fill"], ["translate"]):
        assert main(["demo", *words]) == 0
    assert [(kind, plan.run.as_posix()) for kind, plan in calls] == [
        ("translate", "runs/demo"),
        ("generate", "runs/demo-generate"),
        ("classify", "runs/demo-classify"),
        ("fill", "runs/demo-fill"),
        ("translate", "runs/demo-2"),
    ]
    assert calls[0][1] == DemoPlan(run=Path("runs/demo"), seed=1, overrides=[])
    shown = capsys.readouterr().out
    assert "clearhead train runs/demo-fill/run.toml train.run=runs/demo-fill-again" in shown
    assert "Go on: clearhead x" in shown


@pytest.mark.parametrize(("folder", "is_left"), [("data", False), ("checkpoints", True)])
def test_a_demo_that_is_stopped_before_it_trains_leaves_nothing(
    folder: str, is_left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(plan: DemoPlan) -> DemoOutcome:
        (plan.run / folder).mkdir(parents=True)
        raise InputError("stopped")

    monkeypatch.setattr("clearhead.apps.demo.fill.run_fill", run)
    assert main(["demo", "fill", "--out", str(tmp_path / "run")]) == 2
    assert (tmp_path / "run").exists() == is_left


def test_only_pictures_that_were_drawn_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_ins(monkeypatch)
    assert main(["demo", "--out", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert f"Seen: {tmp_path}/run/there.png" in shown and "Unseen" not in shown and "Loss" not in shown
    page = (tmp_path / "run" / "plots" / "heads.html").as_uri()
    assert shown.endswith(f"All heads as a page, to open in a browser: {page}\n")
    assert f"clearhead view {tmp_path}/run TEXT" in shown


def test_code_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    code = "x = {a[1:2]:key: [bold]}  # 5 :x: " + "long " * 99
    results_console().print(code, markup=False)
    assert capsys.readouterr().out == code + "\n"


def test_options_reach_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_ins(monkeypatch)
    words = ["--seed", "7", "--threads", "1", "--device", "cpu", "--precision", "fp32", "--batch-size", "5"]
    assert main(["demo", "fill", "--out", str(tmp_path / "run"), *words]) == 0
    ((_, plan),) = calls
    assert (plan.seed, plan.device, plan.precision, plan.batch_size) == (7, "cpu", "fp32", 5)
    assert plan.overrides == ["train.device=cpu", "train.precision=fp32", "train.threads=1"]


def test_json_ends_with_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_ins(monkeypatch)
    run = tmp_path / "run"
    assert main(["demo", "classify", "--json", "--out", str(run)]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record == {"kind": "classify", "seconds": record["seconds"], "run": str(run)}
    assert record["seconds"] >= 0
