"""`clearhead evaluate` measures each kind of model as its training did, and refuses what has no effect."""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead
from clearhead.apps.cli.main import main
from clearhead.base.errors import InputError, RunFailure
from clearhead.base.progress import use_display
from tests.apps.cli.test_commands import last_json, run
from tests.apps.cli.test_generate import run_refused
from tests.apps.cli.tiny_tasks import train_task
from tests.recording_display import RecordingDisplay

Runs = Callable[[str], Path]


def last_validation(run_directory: Path) -> dict[str, Any]:
    """Return the last validation of a run."""
    lines = (run_directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return next(row for row in reversed(rows) if row["valid_loss"] is not None)


def data_of(run_directory: Path, kind: str) -> list[str]:
    """Return the options that name the validation data of a tiny run."""
    folder = run_directory.parent
    column = ["--labels", "number" if kind == "number" else "label"]
    return {
        # Every line is a document, as in training.
        **{task_kind: ["--text", f"{folder}/held-out.txt"] for task_kind in ("generate", "fill", "denoise", "prefix")},
        "several": ["--text", f"{folder}/valid.jsonl", *column],
        "tag": ["--text", f"{folder}/valid.conll"],
        "answer": ["--text", f"{folder}/valid.jsonl"],
        "embed": ["--source", f"{folder}/valid.source", "--target", f"{folder}/valid.target"],
    }.get(kind, ["--text", f"{folder}/valid.tsv", *column, *(["--pair", "other"] if kind == "pair" else [])])


def evaluate_run(kind: str, runs: Runs, capfd: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """Evaluate the last checkpoint of a tiny run on its validation data."""
    run_directory = runs(kind)
    return last_json(run(capfd, "evaluate", f"{run_directory}@last", *data_of(run_directory, kind), "--json", *options))


SCORES: dict[str, Callable[[dict[str, Any]], float]] = {
    "classify": lambda record: 100 * record["accuracy"],
    "pair": lambda record: 100 * record["accuracy"],
    "number": lambda record: 100 * record["spearman"],
    "several": lambda record: 100 * record["micro_f1"],
    "tag": lambda record: 100 * record["f1"],
    "embed": lambda record: 100 * record["recall_at_1"],
    "answer": lambda record: 100 * record["f1"],
}


@pytest.mark.parametrize("kind", SCORES)
def test_it_agrees_with_the_validation(kind: str, runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    record, expected = evaluate_run(kind, runs, capfd), last_validation(runs(kind))
    assert math.isclose(SCORES[kind](record), expected["valid_score"], rel_tol=1e-6, abs_tol=1e-6)
    if "loss" in record:
        assert math.isclose(record["loss"], expected["valid_loss"], rel_tol=1e-5)


def test_the_loss_of_text_is_that_of_the_validation(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    record = evaluate_run("generate", runs, capfd)
    text = (runs("generate").parent / "held-out.txt").read_bytes().replace(b"\n", b"")
    assert math.isclose(record["loss"], last_validation(runs("generate"))["valid_loss"], rel_tol=1e-5)
    assert math.isclose(record["perplexity"], math.exp(record["loss"]), rel_tol=1e-9)
    assert record["bytes"] == len(text) and record["tokens"] == len(text) + 25
    nats = record["loss"] * record["tokens"]
    assert math.isclose(record["bits_per_byte"], nats / math.log(2) / len(text), rel_tol=1e-9)


@pytest.mark.parametrize("kind", ["fill", "denoise", "prefix"])
def test_hidden_tokens_are_those_of_the_validation(kind: str, runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    record, expected = evaluate_run(kind, runs, capfd), last_validation(runs(kind))
    assert math.isclose(record["loss"], expected["valid_loss"], rel_tol=1e-5)
    if kind != "prefix":
        assert math.isclose(100 * record["accuracy"], expected["valid_score"], rel_tol=1e-6)
    whole = evaluate_run(kind, runs, capfd, "--document", "file")
    assert whole["loss"] != record["loss"], "an option wins over the run"


@pytest.mark.parametrize("kind", ["generate", "fill", "number", "tag", "answer", "embed"])
def test_without_data_a_run_is_measured_on_its_own_validation_data(
    kind: str, runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = without_times(evaluate_run(kind, runs, capfd))
    assert main(["evaluate", f"{runs(kind)}@last", "--json"]) == 0
    captured = capfd.readouterr()
    assert without_times(json.loads(captured.out)) == expected
    assert f"measuring {runs(kind)}@last on its validation data: data.valid = " in captured.err
    assert "valid" in captured.err.partition("data.valid = ")[2] or "held-out" in captured.err


@pytest.mark.parametrize(("kind", "score"), [("tag", "entity F1"), ("generate", None)])
def test_a_share_that_training_held_out_is_measured_as_the_training_did(
    kind: str,
    score: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run_directory = train_task(tmp_path, kind, "data.valid=0.3")
    # A run directory of a stranger imports no code of the working directory.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts.py").write_text("raise SystemExit(99)", encoding="utf-8")
    text = (run_directory / "run.toml").read_text("utf-8")
    (run_directory / "run.toml").write_text(text.replace("[model]", '[model]\nparts = "parts.py"'), encoding="utf-8")
    capfd.readouterr()
    assert main(["evaluate", f"{run_directory}@last", "--json"]) == 0
    captured = capfd.readouterr()
    record, expected = json.loads(captured.out), last_validation(run_directory)
    assert record["loss"] == pytest.approx(expected["valid_loss"], rel=1e-5)
    assert record["score"] == (None if score is None else pytest.approx(expected["valid_score"], rel=1e-5))
    assert " on its validation data: data.valid = 0.3\n" in captured.err
    out = run(capfd, "evaluate", str(run_directory))
    assert out.startswith("loss ") and (score is None) != (f", {score} " in out)
    message = run_refused(capfd, "evaluate", str(run_directory), "--batch-size", "2")
    assert "--batch-size: no effect on held-out training data; name other data" in message


def test_a_saved_model_has_no_validation_data(runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    clearhead.load(runs("tag")).save(tmp_path / "saved")
    assert "--text is missing" in run_refused(capfd, "evaluate", str(tmp_path / "saved"))


@pytest.mark.parametrize(
    "data", ["data = 3", "[data]\nvalid = 2026-11-27", "[data]\nvalid = { text = 2026-11-27 }", ""]
)
def test_a_run_file_without_usable_validation_data_is_refused(
    data: str, runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changed = shutil.copytree(runs("tag"), tmp_path / "changed")
    (changed / "run.toml").write_text(data, encoding="utf-8")
    assert "text" in run_refused(capfd, "evaluate", str(changed))


def test_data_is_read_as_in_training(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    run_directory = runs("pair")
    text = f"{run_directory.parent}/valid.tsv"
    capfd.readouterr()
    assert main(["evaluate", f"{run_directory}@last", "--text", text, "--json"]) == 0
    captured = capfd.readouterr()
    assert 'the data were read with settings of the training data: labels = "label", pair = "other"' in captured.err
    assert json.loads(captured.out) == evaluate_run("pair", runs, capfd)
    assert clearhead.load(f"{run_directory}@last").evaluate({"text": text}) == evaluate_run("pair", runs, capfd)


@pytest.mark.parametrize("kind", ["classify", "number", "tag", "embed", "generate", "fill", "translate"])
def test_numbers_that_overflow_are_refused(kind: str, runs: Runs, trained: Path) -> None:
    run_directory = trained / "run" if kind == "translate" else runs(kind)
    model = clearhead.load(f"{run_directory}@last")
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(1e30)
    sides = {side: f"{run_directory.parent}/valid.{side}" for side in ("source", "target")}
    data = sides if kind == "translate" else dict(zip(*[iter(data_of(run_directory, kind))] * 2, strict=True))
    with pytest.raises((InputError, RunFailure), match=r"finite|not a number"):
        model.evaluate({name.removeprefix("--"): value for name, value in data.items()})


def test_weights_that_are_no_numbers_are_refused(trained: Path, tmp_path: Path) -> None:
    model = clearhead.load(trained / "run")
    name, parameter = list(model.module.named_parameters())[-1]
    with torch.no_grad():
        parameter.flatten()[3] = math.nan
    model.save(tmp_path / "diverged")
    with pytest.raises(InputError, match=f"1 of .* numbers in {name} are NaN or infinite.*an earlier checkpoint"):
        clearhead.load(tmp_path / "diverged")


def test_a_data_set_gives_the_numbers_of_its_files(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    columns: dict[str, list[str]] = {}
    for side in ("source", "target"):
        columns[side] = (runs("embed").parent / f"valid.{side}").read_text(encoding="utf-8").splitlines()
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "pairs.parquet")
    options = [f"{name}={tmp_path}/pairs.parquet:{name[2:]}" for name in ("--source", "--target")]
    record = last_json(run(capfd, "evaluate", f"{runs('embed')}@last", *options, "--json"))
    assert record | {"seconds": 0} == evaluate_run("embed", runs, capfd) | {"seconds": 0}
    message = run_refused(capfd, "evaluate", str(runs("embed")), "--source", "hf:a/b:de", "--target", "hf:a/b:en")
    assert "hf:a/b:de names no split of the data set; add one in brackets, such as [test]" in message


def test_a_stride_gives_each_token_more_before_it(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    apart = evaluate_run("generate", runs, capfd, "--window", "5")
    sliding = evaluate_run("generate", runs, capfd, "--window", "5", "--stride", "1")
    assert apart["tokens"] == sliding["tokens"] and apart["loss"] != sliding["loss"]
    whole = evaluate_run("generate", runs, capfd, "--window", "101", "--stride", "1")
    assert math.isclose(whole["loss"], evaluate_run("generate", runs, capfd)["loss"], rel_tol=1e-5)


@pytest.mark.parametrize("kind", ["fill", "denoise", "prefix"])
def test_hidden_tokens_are_the_same_every_time(kind: str, runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    """Also in batches of another size."""
    first, second = (evaluate_run(kind, runs, capfd, "--seed", seed) for seed in ("1", "2"))
    assert evaluate_run(kind, runs, capfd, "--batch-size", "3") == pytest.approx(first, rel=1e-5)
    assert first == second and set(first) == {"loss", "perplexity", "accuracy"}
    assert math.isclose(first["perplexity"], math.exp(first["loss"]), rel_tol=1e-9) and 0 <= first["accuracy"] <= 1


@pytest.mark.parametrize("kind", ["fill", "denoise"])
def test_the_noise_is_that_of_the_training(
    kind: str, runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    losses = []
    for share in (0.15, 0.5, None):
        changed = shutil.copytree(runs(kind), tmp_path / str(share))
        (changed / "manifest.json").unlink()
        record = json.loads((changed / "task.json").read_text("utf-8"))
        assert record["noise"]["share"] == 0.15, "what a run file has by default"
        record["noise"] = record["noise"] | {"share": share} if share else None
        (changed / "task.json").write_text(json.dumps(record), encoding="utf-8")
        if share is None:
            assert "lacks the noise of its training" in run_refused(
                capfd, "evaluate", f"{changed}@last", *data_of(runs(kind), kind)
            )
        else:
            losses.append(last_json(run(capfd, "evaluate", f"{changed}@last", *data_of(runs(kind), kind), "--json")))
    assert losses[0] == evaluate_run(kind, runs, capfd) != losses[1]


def test_classes_for_a_person(runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_directory = runs("classify")
    picture = tmp_path / "confusion.png"
    out = run(capfd, "evaluate", str(run_directory), *data_of(run_directory, "classify"), "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    for expected in ("accuracy", "macro F1", "precision", "early", "late"):
        assert expected in out
    options = [*data_of(run_directory, "classify"), "--force"]
    assert "--force has no effect without" in run_refused(capfd, "evaluate", str(run_directory), *options)


def test_the_table_of_classes_follows_from_the_matrix(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    record = evaluate_run("pair", runs, capfd)
    matrix = np.array(record["confusion"])
    assert matrix.sum() == record["texts"]
    for index, (name, row) in enumerate(record["labels"].items()):
        assert name == ("early", "late")[index] and row["count"] == matrix[index].sum()
        predicted = matrix[:, index].sum()
        assert row["precision"] == (matrix[index, index] / predicted if predicted else None)
        assert row["recall"] == matrix[index, index] / row["count"]
    assert evaluate_run("pair", runs, capfd, "--batch-size", "3")["confusion"] == record["confusion"]
    f1 = [row["f1"] for row in record["labels"].values()]
    assert math.isclose(record["macro_f1"], sum(f1) / len(f1), rel_tol=1e-9)


def test_columns_by_number_and_labels_in_a_file(runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_directory = runs("classify")
    by_name = evaluate_run("classify", runs, capfd)
    rows = [line.split("\t") for line in (run_directory.parent / "valid.tsv").read_text("utf-8").splitlines()[1:]]
    (tmp_path / "plain.tsv").write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    for name, column in (("texts", 0), ("labels", 1)):
        (tmp_path / name).write_text("".join(f"{row[column]}\n" for row in rows), encoding="utf-8")
    for text, labels in (("plain.tsv", "2"), ("texts", f"{tmp_path}/labels")):
        options = ["--text", f"{tmp_path}/{text}", "--labels", labels, "--json"]
        assert last_json(run(capfd, "evaluate", f"{run_directory}@last", *options)) == by_name


def test_entities_for_a_person(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    run_directory = runs("tag")
    out = run(capfd, "evaluate", str(run_directory), *data_of(run_directory, "tag"))
    assert "NAME" in out and "accuracy of tags" in out
    assert run(capfd, "evaluate", str(run_directory), *data_of(run_directory, "tag"), "--batch-size", "2") == out


def test_answers_do_not_depend_on_the_batches(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    records = [evaluate_run("answer", runs, capfd, *options) for options in ((), ("--batch-size", "2"))]
    losses = [record.pop("loss") for record in records]
    assert records[0] == records[1] and losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_similarities_follow_scores(
    runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_directory = runs("embed")
    sides = [(run_directory.parent / f"valid.{side}").read_text("utf-8").splitlines() for side in ("source", "target")]
    first, second = (clearhead.load(f"{run_directory}@last").embed(side) for side in sides)
    cosines = (first * second).sum(1)
    (tmp_path / "scores").write_text("".join(f"{-cosine:.9f}\n" for cosine in cosines), encoding="utf-8")
    record = evaluate_run("embed", runs, capfd, "--labels", str(tmp_path / "scores"), "--batch-size", "7")
    assert record["pairs"] == len(cosines) and record["spearman"] < -0.99
    content = (tmp_path / "scores").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert evaluate_run("embed", runs, capfd, "--labels", "-", "--batch-size", "7")["spearman"] == record["spearman"]
    (tmp_path / "scores").write_text("1\ntwo\n", encoding="utf-8")
    options = [*data_of(run_directory, "embed"), "--labels", str(tmp_path / "scores")]
    assert "scores:2: expected a number" in run_refused(capfd, "evaluate", str(run_directory), *options)
    (tmp_path / "scores").write_text("1\n2\n", encoding="utf-8")
    assert "there are 2 similarities, but 31 pairs" in run_refused(capfd, "evaluate", str(run_directory), *options)


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        ("several", ["--labels", "l"], "--text is missing: a model trained to 'classify' is evaluated with --text F"),
        ("embed", ["--source", "s"], "--target is missing"),
        ("tag", ["--window", "3"], "--window has no effect here"),
        ("embed", ["--text", "t"], "--text has no effect here: a model trained to 'embed'"),
        (
            "tag",
            ["--text", "t", "--labels", "l", "--window", "3"],
            "--labels, --window have no effect here: a model trained to 'tag' is evaluated with --text F",
        ),
        ("generate", ["--text", "t", "--plot", "a.png"], "--plot has no effect here"),
        ("fill", ["--text", "t", "--stride", "2"], "--stride has no effect here"),
        ("classify", ["--text", "t", "--labels", "l", "--plot", "a.pdf"], "give a name that ends in .png"),
        ("generate", ["--text", "nowhere"], "nowhere: there is no such file"),
    ],
)
def test_a_wrong_combination_is_one_sentence(
    kind: str, arguments: list[str], expected: str, runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    message = run_refused(capfd, "evaluate", str(runs(kind)), *arguments)
    assert expected in message and message.count("\n") == 1, message


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        ("prefix", ["--window", "3"], "window has no effect here"),
        ("several", ["--plot", "a.png"], "needs a model with one label per text"),
        ("generate", ["--stride", "17"], "stride must be from 1 to the window of 16"),
        ("generate", ["--text-column", "a"], "--text-column belongs to JSON lines"),
        ("classify", ["--text-column", "labl"], "there is no column 'labl'"),
        ("pair", ["--labels", "lable"], "did you mean 'label'?"),
    ],
)
def test_what_suits_the_task_but_not_the_data(
    kind: str, arguments: list[str], expected: str, runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    run_directory = runs(kind)
    assert expected in run_refused(capfd, "evaluate", str(run_directory), *data_of(run_directory, kind), *arguments)


def test_labels_that_training_did_not_see(runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.tsv").write_text("text\tlabel\na m u\tearly\nb n v\tlater\n", encoding="utf-8")
    options = ["--text", f"{tmp_path}/t.tsv", "--labels", "label"]
    message = run_refused(capfd, "evaluate", str(runs("classify")), *options)
    assert "t.tsv:3" in message and "later" in message and "did you mean 'late'?" in message


def examples_of(run_directory: Path, kind: str) -> list[Any]:
    """Return the validation data of a tiny run as a list, in the order of its files."""
    folder = run_directory.parent
    if kind in ("generate", "fill", "denoise", "prefix"):
        return (folder / "held-out.txt").read_text("utf-8").splitlines()
    if kind in ("translate", "embed"):
        sides = [(folder / f"valid.{side}").read_text("utf-8").splitlines() for side in ("source", "target")]
        return list(zip(*sides, strict=True))
    if kind == "several":
        rows = map(json.loads, (folder / "valid.jsonl").read_text("utf-8").splitlines())
        return [(row["text"], tuple(row["label"])) for row in rows]
    if kind == "answer":
        return [tuple(json.loads(line).values()) for line in (folder / "valid.jsonl").read_text("utf-8").splitlines()]
    if kind == "tag":
        sentences = (folder / "valid.conll").read_text("utf-8").split("\n\n")
        pairs = [[line.split("\t") for line in sentence.splitlines()] for sentence in sentences if sentence.strip()]
        return [([word for word, _ in lines], [tag for _, tag in lines]) for lines in pairs]
    rows = [line.split("\t") for line in (folder / "valid.tsv").read_text("utf-8").splitlines()[1:]]
    return {
        "classify": [(text, label) for text, label, _, _ in rows],
        "pair": [(text, other, label) for text, label, _, other in rows],
        "number": [(text, float(number)) for text, _, number, _ in rows],
    }[kind]


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    timed = ("seconds", "sentences_per_second", "translations")
    return {name: value for name, value in record.items() if name not in timed}


@pytest.mark.parametrize("kind", ["generate", "fill", "denoise", "prefix", *SCORES])
def test_python_gives_the_numbers_of_the_command(kind: str, runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    run_directory = runs(kind)
    by_command = without_times(evaluate_run(kind, runs, capfd))
    model = clearhead.load(f"{run_directory}@last")
    assert json.loads(json.dumps(without_times(model.evaluate(examples_of(run_directory, kind))))) == by_command


def test_python_gives_the_numbers_of_translations(
    trained: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = {side: str(trained / f"valid.{side}") for side in ("source", "target")}
    options = ["--beam-size", "3", "--lowercase", "--json", "-o", str(tmp_path / "out")]
    printed = run(capfd, "evaluate", str(trained / "run"), "--source", files["source"], "--target", files["target"],
                  *options)  # fmt: skip
    by_command = without_times(last_json(printed))
    model = clearhead.load(trained / "run")
    for data in (files, examples_of(trained / "run", "translate")):
        record = model.evaluate(data, beam_size=3, lowercase=True)
        assert without_times(record) == by_command
        assert record["translations"] == (tmp_path / "out").read_text("utf-8").splitlines()


def test_python_passes_on_options_and_messages(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    model, display = clearhead.load(f"{runs('generate')}@last"), RecordingDisplay()
    with use_display(display):
        evaluation = model.evaluate(examples_of(runs("generate"), "generate"), window=5, stride=2)
    expected = evaluate_run("generate", runs, capfd, "--window", "5", "--stride", "2")
    assert without_times(evaluation) == without_times(expected)
    assert display.messages == ["300 tokens in 25 documents"]
    vectors = clearhead.load(f"{runs('embed')}@last")
    pairs = examples_of(runs("embed"), "embed")
    assert vectors.evaluate(pairs, similarities=[*range(len(pairs))], batch_size=7)["pairs"] == len(pairs)


@pytest.mark.parametrize(
    ("kind", "data", "options", "expected"),
    [
        ("tag", [(["a"], ["O"])], {"window": 3, "beam_size": 2}, "window, beam_size have no effect on a model trained"),
        ("generate", ["a m"], {"tokenize": "none"}, "tokenize has no effect.*; its options are window, stride"),
        ("generate", ["a m"], {"window": 0}, "window must be a whole number of at least 1, got 0"),
        ("generate", ["a m"], {"windw": 3}, "there is no option 'windw'.*did you mean 'window'"),
        ("generate", "a m", {}, "data: expected a dictionary or a list, got 'a m'"),
        ("generate", [" "], {}, "data, example 1: expected text, found nothing but white space"),
        ("classify", [], {}, "data, example 1: expected at least one labelled text, found none"),
        ("classify", [("a m", "later")], {}, 'data, example 1: the label "later" is not among'),
        ("classify", [("a m u",)], {}, r"data, example 1: expected \(text, label\), got"),
        ("tag", [(["a", "m"], ["O"])], {}, "data, example 1: expected a tag for each of the 2 words, got 1"),
        ("tag", [], {}, "data, example 1: expected at least one tagged sentence, found none"),
        ("answer", [("a", "b c", "c", 1)], {}, 'data, example 1: the answer "c" does not begin at character 1'),
        ("embed", [("a", " ")], {}, "data, example 1: one side of the pair is empty"),
        ("embed", [("a", "b")], {}, "got 1 pair, whose texts find each other in any case"),
        ("generate", ["a m"], {"length_penalty": -11}, "length_penalty must be a number from -10 to 10"),
        ("embed", [("a", "b")], {"similarities": [math.nan]}, "every similarity must be a finite number"),
        ("embed", {"source": "x"}, {}, "'target' is missing"),
    ],
)
def test_what_python_refuses(kind: str, data: Any, options: dict[str, Any], expected: str, runs: Runs) -> None:
    with pytest.raises(clearhead.InputError, match=f"(?s){expected}"):
        clearhead.load(f"{runs(kind)}@last").evaluate(data, **options)
