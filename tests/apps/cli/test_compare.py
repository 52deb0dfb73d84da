"""`clearhead compare` from the outside: its table, its sentences, its JSON and its picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from clearhead.apps.cli.main import main
from tests.apps.cli.tiny_run import write_run_file
from tests.apps.compare.run_maker import RunMaker


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change into a temporary folder, since the picture is written into the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_compare(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[str], str]:
    capfd.readouterr()
    assert main(["compare", *arguments]) == 0
    captured = capfd.readouterr()
    return captured.out.splitlines(), captured.err


def test_the_table(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        points = [(20, 3.0, 11.0), (40, 2.0 + 0.1 * seed, 20.0 + seed)]
        RunMaker(validations=points).write(here / f"a-{seed}", seed=seed)
    RunMaker(overrides=["model.dropout=0.25"], step_tokens=130).write(here / "b", seed=1)
    out, err = run_compare(capfd, "a-1", "a-2", "b")
    head, a, b = out[:3]
    assert head.split() == (
        "run seeds family parameters non-embedding FLOPs tokens steps seconds tokens/s best loss best BLEU".split()
    )
    assert a.split()[:3] == ["a", "2", "encoder-decoder"] and b.split()[:2] == ["b", "1"]
    assert "2.1500 ± 0.0707" in a and "21.50 ± 0.71" in a and "20.0 ± 0.0" in a
    assert "2.0000" in b and "7.50" in b and "±" not in b
    assert "unfair: b saw 1.3 x the tokens of a" in out and "unfair: b had the seed 1, a the seeds 1, 2" in out
    assert any(line.startswith("the same for all: training data, validation data, tokenizer") for line in out)
    assert main(["compare", "a-1", "b", "--force"]) == 0
    assert [line.split() for line in out[-3:]] == [["differs", "in", "model.dropout"], ["a", "-"], ["b", "0.25"]]
    assert err == "learning curves: compare.png\n"
    assert imread(here / "compare.png").shape[1] > 1000


def test_columns_stand_under_their_heads(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    RunMaker().write(here / "a")
    RunMaker(overrides=["model.dropout=0.25"], choices={"tokenizer": "t2"}).write(here / "a-much-longer-name")
    out, _ = run_compare(capfd, "a", "a-much-longer-name")
    head, a, b = out[:3]
    assert "seeds" not in head, "one seed each needs no column"
    assert b.endswith("7.50") and "2.0000*" in b and "2.0000*" not in a
    for word in ("parameters", "tokens/s", "BLEU"):
        end = head.index(word) + len(word)
        assert a[end - 1] not in " " and b[end - 1] not in " "
        assert a[end : end + 1] in ("", " ")
    assert "* losses that cannot be compared with those of a" in out


def test_json(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    RunMaker().write(here / "a")
    RunMaker(overrides=["model.dropout=0.25"], choices={"tokenizer": "t2", "planned_steps": 90}).write(here / "b")
    out, _ = run_compare(capfd, "a", "b", "--json", "-o", "deep/er.png")
    record = json.loads(out[-1])
    a, b = record["rows"]
    assert (a["name"], a["runs"], a["seeds"], a["family"]) == ("a", ["a"], [1], "encoder-decoder")
    assert a["best_valid_loss"] == {"mean": 2.0, "deviation": None, "count": 1} and a["score_name"] == "BLEU"
    assert a["tokens"]["mean"] == 4000 and a["training_flops"]["mean"] > 0
    assert 0 < a["parameters_without_embeddings"] < a["parameters"]
    assert a["loss_is_comparable"] and not b["loss_is_comparable"] and b["score_is_comparable"]
    assert a["finished"] and not b["finished"]
    assert record["picture"] == "deep/er.png" and (here / "deep" / "er.png").exists()
    assert record["differs_in"]["model.dropout"][1] == 0.25
    assert len(record["unfair"]) == len(record["notes"]) == 1


def test_a_real_run_by_itself(trained: Path, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, err = run_compare(capfd, str(trained / "run"))
    assert out[1].split()[:2] == ["run", "encoder-decoder"]
    assert not any(line.startswith(("unfair", "the same", "differs")) for line in out)
    assert "compare.png" in err


def test_a_run_in_training(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(here)
    assert main(["train", str(file), "train.steps=6", "train.validate_every=100", "train.save_every=2"]) == 0
    lines = (here / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    row = {**json.loads(lines[-1]), "step": 3, "valid_loss": None, "valid_score": None}
    (here / "run" / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    for step in (4, 6):
        (here / "run" / "checkpoints" / f"step-{step}" / "manifest.json").unlink()
    (here / "run" / "best").unlink()
    out, err = run_compare(capfd, "run", "--json")
    record = json.loads(out[-1])
    assert record["picture"] is None and "no picture: no run was validated yet" in err
    assert any("reached step 3 of 6" in line for line in record["notes"])
    assert not (here / "compare.png").exists()


def test_a_score_that_one_run_lacks_gives_a_picture_of_the_loss(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    RunMaker().write(here / "a")
    RunMaker(overrides=["model.dropout=0.25"], validations=[(40, 2.0, None)]).write(here / "b")
    out, _ = run_compare(capfd, "a", "b")
    assert out[2].endswith(" -")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["none"], "none: there is no such run directory"),
        (["."], ". is not a run directory"),
        (["a", "a"], "a is named twice"),
        (["a@best"], "a comparison needs whole runs: name a"),
        (["a", "-o", "b.pdf"], "-o b.pdf is not a PNG: give a name that ends in .png"),
        (["a", "-o", "a.png"], "a.png is a folder: name a file in it"),
        ([], "missing argument 'RUN'"),
    ],
)
def test_mistakes(here: Path, arguments: list[str], expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    RunMaker().write(here / "a")
    (here / "a.png").mkdir()
    capfd.readouterr()
    assert main(["compare", *arguments]) == 2
    captured = capfd.readouterr()
    assert expected in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_a_narrow_terminal_gets_a_column_for_each_run(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    RunMaker().write(here / "a")
    RunMaker(overrides=["model.dropout=0.25"]).write(here / "b")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    out, _ = run_compare(capfd, "a", "b")
    assert out[0].split() == ["run", "a", "b"] and out[1].split()[0] == "family"
