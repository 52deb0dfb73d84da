"""Answers are those of the pipeline that transformers 5 removed, as transformers 4.57 recorded them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import clearhead as ch
from clearhead.apps.cli.main import main
from clearhead.base.errors import InputError
from clearhead.tasks.answer.pipeline import Parameters, run
from clearhead.tasks.answer.use import answer
from tests.tasks.answer.recorded_pipeline import MODELS, QUESTION, cases, write

RECORD = json.loads(Path(__file__).with_name("recorded_answers.json").read_text("utf-8"))


@pytest.mark.parametrize("model_type", MODELS)
def test_answers_are_those_of_the_recorded_pipeline(model_type: str, tmp_path: Path) -> None:
    assert RECORD["transformers"].startswith("4.57.")
    model = ch.load(write(tmp_path / model_type, model_type), precision="fp32", device="cpu")
    rows = RECORD["records"][model_type]
    assert [{key: value for key, value in row.items() if key != "answers"} for row in rows] == cases()
    num_windows, texts = 0, set()
    for row in rows:
        actual = answer(
            model.module, model.tokenizer, model.task, QUESTION, row["context"], top_k=row["top_k"],
            allow_no_answer=row["handle_impossible_answer"], max_tokens=row.get("max_answer_len"),
            doc_stride=row.get("doc_stride"), align_to_words=True,
        )  # fmt: skip
        assert [(found.text, found.start, found.end) for found in actual] == [
            (expected["answer"], expected["start"], expected["end"]) for expected in row["answers"]
        ]
        scores = [expected["score"] for expected in row["answers"]]
        assert np.allclose([found.score for found in actual], scores, rtol=1e-4, atol=1e-7)
        num_windows += "doc_stride" in row
        texts |= {found.text for found in actual}
    assert num_windows >= 12 and len(texts) >= 8, "the record says little"


def test_the_record_has_questions_without_an_answer() -> None:
    rows = [row for rows in RECORD["records"].values() for row in rows]
    assert sum(answer["answer"] == "" for row in rows for answer in row["answers"]) >= 3


def test_the_schema_of_the_server_gives_the_same_answers(tmp_path: Path) -> None:
    model = ch.load(write(tmp_path / "bert", "bert"), precision="fp32", device="cpu")
    rows = [row for row in RECORD["records"]["bert"] if "max_answer_len" not in row and row["top_k"] > 1]
    for row in rows:
        options = {key: row[key] for key in ("top_k", "handle_impossible_answer", "doc_stride") if key in row}
        (listed,) = run(model, [{"question": QUESTION, "context": row["context"]}], Parameters(**options))
        assert [(item["answer"], item["start"]) for item in listed] == [
            (item["answer"], item["start"]) for item in row["answers"]
        ]


def test_the_command_gives_the_same_answers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "bert", "bert")
    row = next(row for row in RECORD["records"]["bert"] if "doc_stride" in row and row["top_k"] > 1)
    assert row["answers"] and "max_answer_len" not in row
    words = [
        "answer", f"{folder}", "--question", QUESTION, "--context", row["context"], "--top-k", f"{row['top_k']}",
        "--align-to-words", "--precision", "fp32", *["--no-answer"] * row["handle_impossible_answer"], "--json",
    ]  # fmt: skip
    assert main([*words, "--doc-stride", f"{row['doc_stride']}"]) == 0
    listed = json.loads(capfd.readouterr().out.splitlines()[-1])["answers"]
    assert [(item["text"], item["start"]) for item in listed] == [
        (item["answer"], item["start"]) for item in row["answers"]
    ]
    assert main([*words, "--doc-stride", "9999"]) == 2
    assert "--doc-stride must be 0 to" in capfd.readouterr().err


def test_a_stride_that_leaves_no_step_is_refused(tmp_path: Path) -> None:
    model = ch.load(write(tmp_path / "bert", "bert"), precision="fp32", device="cpu")
    with pytest.raises(InputError, match=r"doc_stride must be 0 to \d+, as a window holds \d+ tokens, got 60"):
        model.answer(QUESTION, "the singer stands.", doc_stride=60)
