"""Output of the commands: results on stdout, messages on stderr, and one JSON object last for --json."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from clearhead.apps.cli.main import main
from clearhead.checkpoints.runs.checkpoint import checkpoint_steps
from tests.apps.cli.tiny_run import PAIRS, write_run_file


def run(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Run a command line in this process and return what it wrote to stdout."""
    capfd.readouterr()
    assert main(list(arguments)) == code, capfd.readouterr().err
    return capfd.readouterr().out


def last_json(out: str) -> dict[str, Any]:
    record = json.loads(out.splitlines()[-1])
    assert isinstance(record, dict)
    return record


def test_train_ends_in_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record = last_json(run(capfd, "train", str(write_run_file(tmp_path)), "train.steps=4", "--json"))
    assert set(record) == {"run", "step", "best", "seconds"}
    assert record["run"] == str(tmp_path / "run") and record["step"] == 4
    assert re.fullmatch(r"step-\d+", record["best"]) and record["seconds"] > 0


def test_train_writes_the_run_directory(trained: Path) -> None:
    names = {entry.name for entry in (trained / "run").iterdir()}
    assert {"run.toml", "spec.json", "tokenizer.json", "checkpoints", "best", "metrics.jsonl", "plots"} <= names


def test_train_prints_the_run_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(capfd, "train", str(write_run_file(tmp_path)), "train.steps=2") == f"{tmp_path}/run\n"


def test_options_of_the_machine_are_overrides(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(
        capfd, "train", str(write_run_file(tmp_path)), "train.steps=1",
        "--seed", "7", "--threads", "1", "--batch-size", "64", "--device", "cpu", "--precision", "fp32",
    )  # fmt: skip
    resolved = (tmp_path / "run" / "run.toml").read_text(encoding="utf-8")
    for line in ("seed = 7", "threads = 1", "batch_tokens = 64", 'device = "cpu"', 'precision = "fp32"'):
        assert line in resolved.splitlines()


def test_resume_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(tmp_path)
    run(capfd, "train", str(file), "train.steps=3")
    record = last_json(run(capfd, "train", str(file), "--resume", "train.steps=5", "--json"))
    assert record["step"] == 5
    record = last_json(run(capfd, "train", str(tmp_path / "run"), "--resume", "train.steps=6", "--json"))
    assert record["step"] == 6
    record = last_json(run(capfd, "train", str(tmp_path / "run"), "train.steps=7", "--json"))
    assert record["step"] == 7, "a run directory is named to continue it"


def test_a_copied_run_goes_on_in_its_own_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(capfd, "train", str(write_run_file(tmp_path)), "train.steps=3")
    copy = shutil.copytree(tmp_path / "run", tmp_path / 'a "copy"')
    record = last_json(run(capfd, "train", str(copy), "--resume", "train.steps=5", "--json"))
    assert record == {**record, "run": str(copy), "step": 5}
    assert checkpoint_steps(copy)[-1] == 5 and checkpoint_steps(tmp_path / "run")[-1] == 3


def test_a_longer_run_says_that_its_schedule_moved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(tmp_path)
    options = ["train.schedule=cosine", "train.warmup=1"]
    assert main(["train", str(file), *options, "train.steps=3"]) == 0
    assert "cosine schedule" not in capfd.readouterr().err
    assert main(["train", str(file), *options, "--resume", "train.steps=4"]) == 0
    assert "the cosine schedule now has 4 steps instead of 3" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["best", "last", "step-3", ""])
def test_translate_answers_line_by_line(
    name: str, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "input"
    file.write_text("a m u\n\n   \nb n\u2028v\nc o w", encoding="utf-8")
    out = run(capfd, "translate", f"{trained}/run" + (f"@{name}" if name else ""), str(file))
    lines = out.split("\n")
    assert len(lines) == 6 and lines[1] == lines[2] == lines[5] == ""


def test_translate_reads_standard_input(
    trained: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a m u\n\nb n v\n")))
    piped = run(capfd, "translate", f"{trained}/run")
    assert piped.count("\n") == 3 and piped.split("\n")[1] == ""


def test_translations_do_not_depend_on_the_chunks(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "input"
    file.write_text("".join(f"{source}\n" for source, _ in PAIRS[:23]), encoding="utf-8")
    whole = run(capfd, "translate", f"{trained}/run", str(file))
    monkeypatch.setattr("clearhead.base.arguments.FIRST_WINDOW", 7)
    assert run(capfd, "translate", f"{trained}/run", str(file)) == whole
    assert (
        run(capfd, "translate", f"{trained}/run", str(file), "--batch-size", "2", "--threads", "1", "--seed", "3")
        == whole
    )


def test_translate_n_best(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "input"
    file.write_text("a m u\n\nb n v\n", encoding="utf-8")
    out = run(
        capfd, "translate", f"{trained}/run", str(file), "--n-best", "3", "--beam-size", "4", "--length-penalty", "0.5"
    )
    rows = [line.split(" ||| ") for line in out.splitlines()]
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert out.splitlines().count("1 |||  ||| ") == 1 and len([row for row in rows if row[0] == "1"]) == 1
    for index in ("0", "2"):
        scores = [float(row[2]) for row in rows if row[0] == index]
        assert 1 <= len(scores) <= 3 and scores == sorted(scores, reverse=True)


def test_translate_alignments(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "input"
    file.write_text("a m u\n\nb n v\n", encoding="utf-8")
    plain = run(capfd, "translate", f"{trained}/run", str(file)).splitlines()
    assert main(["translate", f"{trained}/run", str(file), "--alignments"]) == 0
    out, err = capfd.readouterr()
    heads = re.search(r"--alignment-heads ([\d.,]+)\n", err)
    assert heads is not None
    texts, written = zip(*(line.split(" ||| ") for line in out.splitlines() if line), strict=True)
    assert [texts[0], "", texts[1]] == plain
    assert all(re.fullmatch(r"\d+-\d+( \d+-\d+)*", line) for line in written)
    assert run(capfd, "translate", f"{trained}/run", str(file), "--alignment-heads", heads[1]) == out
    several = run(capfd, "translate", f"{trained}/run", str(file), "--alignments", "--n-best", "2", "--json")
    records = list(map(json.loads, several.splitlines()))
    assert [record["alignment"] for record in records[::2]] == list(written)
    assert "alignment" in records[0]["hypotheses"][1]
    assert main(["translate", f"{trained}/run", str(file), "--alignment-heads", "0"]) == 2
    assert "--alignment-heads expects LAYER.HEAD, such as 2.0,3.1; got 0" in capfd.readouterr().err


def test_translate_json_has_one_object_for_each_line(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "input"
    file.write_text("a m u\n\n", encoding="utf-8")
    first, second = map(
        json.loads, run(capfd, "translate", f"{trained}/run", str(file), "--json", "--n-best", "2").splitlines()
    )
    assert set(first) == {"index", "source", "text", "score", "log_probability", "hypotheses"}
    assert (first["index"], first["source"]) == (0, "a m u")
    assert first["hypotheses"][0]["text"] == first["text"] and len(first["hypotheses"]) == 2
    assert (second["index"], second["text"], second["hypotheses"]) == (1, "", [])


def test_evaluate_ends_in_json(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    complete = tmp_path / "translations"
    record = last_json(
        run(
            capfd, "evaluate", f"{trained}/run", "--source", f"{trained}/valid.source",
            "--target", f"{trained}/valid.target", "--json", "-o", str(complete),
        )
    )  # fmt: skip
    assert {"bleu", "chrf", "signature", "loss", "perplexity", "seconds"} <= set(record)
    assert 0 <= record["bleu"] <= 100 and "tok:13a" in record["signature"]
    assert math.isclose(record["perplexity"], math.exp(record["loss"]), rel_tol=1e-6)
    assert len(complete.read_text(encoding="utf-8").splitlines()) == 25


def test_evaluate_agrees_with_validation(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    metrics = [
        json.loads(line) for line in (trained / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    validated = {row["step"]: row for row in metrics if row["valid_loss"] is not None}
    data = ["--source", f"{trained}/valid.source", "--target", f"{trained}/valid.target"]
    record = last_json(run(capfd, "evaluate", f"{trained}/run@step-6", *data, "--beam-size", "1", "--json"))
    assert math.isclose(record["loss"], validated[6]["valid_loss"], rel_tol=1e-5)
    assert math.isclose(record["bleu"], validated[6]["valid_score"], rel_tol=1e-6, abs_tol=1e-9)


def test_evaluate_for_a_person(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = ["--source", f"{trained}/valid.source", "--target", f"{trained}/valid.target"]
    out = run(capfd, "evaluate", f"{trained}/run", *data, "--tokenize", "none", "--lowercase")
    for expected in ("BLEU", "chrF", "tok:none", "case:lc", "perplexity", "sentences per second"):
        assert expected in out


def test_average(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record = last_json(run(capfd, "average", f"{trained}/run", "--last", "2", "--json"))
    assert record["run"] == f"{trained}/run" and record["steps"] == [3, 6]
    assert Path(record["path"]).is_file()
    assert run(capfd, "translate", f"{trained}/run@averaged", f"{trained}/valid.source").count("\n") == 25


def test_average_of_one_is_that_one(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(capfd, "average", f"{trained}/run", "--last", "1")
    data = ["--source", f"{trained}/valid.source", "--target", f"{trained}/valid.target", "--json"]
    averaged = last_json(run(capfd, "evaluate", f"{trained}/run@averaged", *data))
    last = last_json(run(capfd, "evaluate", f"{trained}/run@step-6", *data))
    assert averaged["loss"] == last["loss"]


def test_inspect_shows_the_model(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = run(capfd, "inspect", f"{trained}/run")
    for expected in (
        "encoder",
        "decoder",
        "Attention(",
        "FeedForward(size=22",
        "parameters",
        "memory",
        "FLOPs",
        "attention",
    ):
        assert expected in out, expected
    without = "".join(line for line in out.splitlines(keepends=True) if not line.startswith(("kernels", "batches")))
    assert run(capfd, "inspect", f"{trained}/run/spec.json") == without != out, "a spec alone has no weights to serve"


def test_inspect_json(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from safetensors import safe_open

    record = last_json(run(capfd, "inspect", f"{trained}/run", "--json"))
    with safe_open(trained / "run" / "checkpoints" / "step-6" / "weights.safetensors", framework="pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert record["parameters"] == stored and record["parameter_bytes"] == 4 * stored
    assert record["target_flops"] > 0 and record["attention"]
