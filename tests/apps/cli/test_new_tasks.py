"""`clearhead new` for the tasks beyond translation: what it writes is accepted, trains, and fits the data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clearhead.apps.cli.main import main
from clearhead.training.runfile.read import load_run_file
from tests.apps.cli.test_generate import run_refused
from tests.apps.cli.tiny_run import PAIRS, write_pairs
from tests.apps.cli.tiny_tasks import (
    LINES,
    SENTENCES,
    write_labelled,
    write_lines,
    write_questions,
    write_sets,
    write_tagged,
)

KINDS = ("generate", "fill", "denoise", "classify", "tag", "answer", "embed")
SMALL = ["train.steps=3", "model.width=16", "model.feedforward=8", "model.layers=1", "model.heads=2"]

pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tests run in the folder of their data, so that paths are short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_data(folder: Path, kind: str) -> list[str]:
    """Write data of one kind, and return the options that name it."""
    if kind == "embed":
        write_pairs(folder, "train", PAIRS)
        return ["--source", "train.source", "--target", "train.target"]
    if kind == "tag":
        write_tagged(folder, "train", SENTENCES)
        return ["--text", "train.conll"]
    if kind == "answer":
        write_questions(folder, "train", SENTENCES)
        return ["--text", "train.jsonl"]
    if kind == "classify":
        write_labelled(folder, "train", SENTENCES)
        return ["--text", "train.tsv", "--labels", "label"]
    write_lines(folder / "text.txt", LINES)
    return ["--text", "text.txt"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_writes_trains(kind: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["new", kind, *write_data(folder, kind), "--json"]) == 0, capfd.readouterr().err
    record = json.loads(capfd.readouterr().out)
    text = (folder / "run.toml").read_text(encoding="utf-8")
    assert text.count("#") > 15 and f'kind = "{kind}"' in text
    written = load_run_file(folder / "run.toml")
    assert record["file"] == "run.toml" and record["run"] == written.train.run
    assert main(["train", "run.toml", *SMALL]) == 0, capfd.readouterr().err
    assert (folder / written.train.run / "checkpoints" / "step-3").is_dir()


def test_labelled_texts_are_held_out_by_label(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = write_labelled(folder, "train", SENTENCES).read_bytes()
    assert main(["new", "classify", "--text", "train.tsv", "--labels", "label", "--pair", "other"]) == 0
    assert "held out 12 texts" in capfd.readouterr().err and (folder / "train.tsv").read_bytes() == before
    parts = {}
    for name in ("train", "valid"):
        lines = (folder / "run-data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        parts[name] = [json.loads(line) for line in lines]
    # 50 of the 125 texts have the one label, 75 the other.
    labels = sorted(record["label"] for record in parts["valid"])
    assert labels == ["early"] * 5 + ["late"] * 7
    assert sorted(record["text"] for rows in parts.values() for record in rows) == sorted(SENTENCES)
    assert all(record["pair"] == record["text"][::-1] for rows in parts.values() for record in rows)
    written = load_run_file(folder / "run.toml").data
    assert written.train.model_dump(exclude_none=True) == {
        "text": "run-data/train.jsonl", "labels": "label", "pair": "pair",
    }  # fmt: skip


def test_tagged_sentences_are_held_out_whole(folder: Path) -> None:
    write_tagged(folder, "train", SENTENCES)
    assert main(["new", "tag", "--text", "train.conll"]) == 0
    lines = (folder / "run-data" / "valid.jsonl").read_text(encoding="utf-8").splitlines()
    held = {" ".join(json.loads(line)["tokens"]) for line in lines}
    assert len(held) == 12 and held < set(SENTENCES)


@pytest.mark.parametrize("kind", KINDS)
def test_given_validation_is_used_and_nothing_is_copied(
    kind: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = write_data(folder, kind)
    if kind == "embed":
        write_pairs(folder, "val", PAIRS[:7])
        valid = ["--valid-source", "val.source", "--valid-target", "val.target"]
    else:
        name = options[1].replace("train", "val")
        (folder / name).write_bytes((folder / options[1]).read_bytes())
        valid = ["--valid-text", name]
    assert main(["new", kind, *options, *valid, "--run", "runs/x", "-o", "own.toml"]) == 0
    written = load_run_file(folder / "own.toml")
    validation_table = written.data.valid.model_dump(exclude_none=True)
    assert valid[1] in validation_table.values() and written.train.run == "runs/x"
    assert "have a text of the training data" in capfd.readouterr().err
    assert not list(folder.glob("*-data"))


@pytest.mark.parametrize(("column", "expected"), [("label", "single_label"), ("number", "regression")])
def test_what_a_label_is_follows_from_the_column(column: str, expected: str, folder: Path) -> None:
    write_labelled(folder, "train", SENTENCES)
    assert main(["new", "classify", "--text", "train.tsv", "--labels", column]) == 0
    written = load_run_file(folder / "run.toml")
    # Numbers cannot be smoothed, and naive Bayes does not predict them.
    assert written.task.labels == expected and bool(written.train.label_smoothing) == (expected == "single_label")
    assert ("naive Bayes" in (folder / "run.toml").read_text(encoding="utf-8")) == (expected == "single_label")


def test_lists_are_several_labels(folder: Path) -> None:
    write_sets(folder, "train", SENTENCES)
    assert main(["new", "classify", "--text", "train.jsonl", "--labels", "label"]) == 0
    assert load_run_file(folder / "run.toml").task.labels == "multi_label"


def test_columns_by_number_and_labels_in_a_file(folder: Path) -> None:
    write_lines(folder / "texts", SENTENCES)
    write_lines(folder / "labels", [sentence[0] for sentence in SENTENCES])
    assert main(["new", "classify", "--text", "texts", "--labels", "labels"]) == 0
    write_lines(folder / "plain.tsv", [f"{sentence[0]}\t{sentence}" for sentence in SENTENCES])
    assert main(["new", "classify", "--text", "plain.tsv", "--labels", "1", "-o", "plain.toml"]) == 0
    copies = [(folder / name / "train.jsonl").read_bytes() for name in ("run-data", "plain-data")]
    assert copies[0] == copies[1]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (LINES, "line"),
        ([line.removesuffix(".") for line in LINES], "file"),
        ([f"    {line}" for line in LINES], "file"),
    ],
)
def test_sentences_are_documents_and_other_lines_are_not(lines: list[str], expected: str, folder: Path) -> None:
    write_lines(folder / "text.txt", lines)
    assert main(["new", "generate", "--text", "text.txt"]) == 0
    assert load_run_file(folder / "run.toml").data.train.model_dump()["document"] == expected
    assert main(["new", "generate", "--text", "text.txt", "--document", "paragraph", "-o", "own.toml"]) == 0
    assert load_run_file(folder / "own.toml").data.train.model_dump()["document"] == "paragraph"


def test_passages_of_one_long_text_are_held_out(folder: Path) -> None:
    story = [line.removesuffix(".") for line in LINES] * (60_000 // sum(map(len, LINES)))
    lines = [f"{row} {line}" for row, line in enumerate(story)]
    write_lines(folder / "story.txt", lines)
    assert main(["new", "generate", "--text", "story.txt"]) == 0
    train, valid = (
        (folder / "run-data" / f"{split}.txt").read_text("utf-8").splitlines() for split in ("train", "valid")
    )
    assert sorted(line for line in train + valid if line) == sorted(lines) and valid != lines[-len(valid) :]
    assert 0.05 < len(valid) / len(lines) < 0.15


def test_a_folder_of_text(folder: Path) -> None:
    (folder / "corpus").mkdir()
    for index in range(5):
        write_lines(folder / "corpus" / f"{index}.txt", LINES[index::5])
    assert main(["new", "generate", "--text", "corpus"]) == 0
    written = load_run_file(folder / "run.toml")
    assert written.train.run == "runs/corpus-generate"
    held = (folder / "run-data" / "valid.txt").read_text(encoding="utf-8").splitlines()
    assert len(held) == 12 and set(held) < set(LINES) and held != LINES[-12:]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["classify", "--text", "t", "--labels", "l", "--valid-labels", "v"], "--valid-labels has no effect without"),
        (["generate", "--text", "nowhere"], "nowhere: there is no such file"),
        (["generate", "--text", ""], "--text is empty: give the path of a file or folder"),
        (["translate", "--source", "s", "--target", "t", "--run", ""], "--run is empty"),
        (["generate", "--text", "t", "--init", ""], "--init is empty"),
        (["generate", "--text", "t", "-o", "."], ". is a folder: name a file in it"),
        (["generate", "--text", "t", "--run", "/dev/null"], "/dev/null is a file: name a folder"),
        (["generate", "--text", "t", "--run", "/dev/null/x"], "/dev/null is not a folder"),
        (["generate", "--text", "t", "--run", "/dev"], "/dev is not empty and holds no run"),
        (["generate", "--text", "t", "--minutes", "inf"], "expects a number of at most 525,600, got 'inf'"),
        (["generate", "--text", "/dev/zero"], "/dev/zero is a pipe or a device"),
        (["translate", "--source", "/dev/zero", "--target", "t"], "/dev/zero is a pipe or a device"),
    ],
)
def test_what_has_no_effect_or_is_not_there_is_named(
    arguments: list[str], expected: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert expected in run_refused(capfd, "new", *arguments)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("kind", "count", "expected"),
    [("classify", 19, "has 19 texts"), ("tag", 19, "has 19 tagged sentences"), ("generate", 7, "needs at least 1000")],
)
def test_too_little_data(kind: str, count: int, expected: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = write_data(folder, kind)
    if kind == "classify":
        write_labelled(folder, "train", SENTENCES[::6][:count])
    elif kind == "tag":
        write_tagged(folder, "train", SENTENCES[:count])
    else:
        write_lines(folder / "text.txt", LINES[:count])
    assert expected in run_refused(capfd, "new", kind, *options)


def test_labels_that_cannot_be_learned(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_lines(folder / "texts", SENTENCES)
    write_lines(folder / "same", ["x"] * len(SENTENCES))
    write_lines(folder / "all", [f"{sentence} {'x' * 99}" for sentence in SENTENCES])
    assert "at least two classes" in run_refused(capfd, "new", "classify", "--text", "texts", "--labels", "same")
    message = run_refused(capfd, "new", "classify", "--text", "texts", "--labels", "all")
    assert "a different label" in message and len(message) < 800
    assert not (folder / "run.toml").exists()


def test_a_run_file_that_starts_from_a_checkpoint(
    runs: Callable[[str], Path], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    encoder, decoder = str(runs("fill")), str(runs("generate"))
    words = ["new", "classify", *write_data(folder, "classify"), "--init"]
    assert "is a model with encoder, but the task 'translate' needs the family encoder-decoder" in run_refused(
        capfd, "new", "translate", *write_data(folder, "embed"), "--init", encoder
    )
    assert not (folder / "run-data").exists()
    assert main([*words, encoder]) == 0, capfd.readouterr().err
    written = load_run_file(folder / "run.toml")
    assert written.task.init == encoder and written.task.pool is None and written.lora is None
    assert written.train.optimizer == "adamw" and written.train.warmup == 0.06
    assert main([*words, decoder, "-o", "other.toml"]) == 0, capfd.readouterr().err
    assert load_run_file(folder / "other.toml").task.init == decoder


def test_the_run_file_says_what_helps_where_a_baseline_is_better(folder: Path) -> None:
    assert main(["new", "classify", *write_data(folder, "classify")]) == 0
    text = (folder / "run.toml").read_text(encoding="utf-8")
    assert "below naive Bayes" in text
    command = text.partition("#   clearhead ")[2].splitlines()[0].split()
    assert command[:6] == ["new", "classify", "--text", "train.tsv", "--labels", "label"] and command[6] == "--init"
