"""Questions with answers: every layout gives the same ones, and every mistake has its place."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from clearhead.base.errors import InputError
from clearhead.tasks.answer.data import DATA, answer_texts, read_answers

NORSE = 'The Normans, "héros" from\u2028Norse raiders, gave their name to Normandy.'


# Context, question, and the answers with their starts.
QUESTIONS = [
    (NORSE, "Who?", [("The Normans", 0), ("Normans", 4)]),
    (NORSE, "From whom?", [("Norse", NORSE.index("Norse"))]),
    (NORSE, "When?", []),
    ("Ada built it.", "Who built it?", [("Ada", 0)]),
]


def write(path: Path, text: str) -> str:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def entry(question: str, answers: list[tuple[str, int]], **changes: Any) -> dict[str, Any]:
    golds = [{"text": text, "answer_start": start} for text, start in answers]
    return {"question": question, "id": "a1", "answers": golds, "is_impossible": not golds, **changes}


def squad(*articles: list[tuple[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    paragraphs = [[{"context": context, "qas": qas} for context, qas in article] for article in articles]
    return {
        "version": "v2.0",
        "data": [{"title": "t", "paragraphs": paragraphs_of_article} for paragraphs_of_article in paragraphs],
    }


def rows(questions: list[tuple[str, str, list[tuple[str, int]]]]) -> str:
    """The questions as JSON lines: lists of several answers, one answer, and none."""
    records = []
    for context, question, answers in questions:
        texts, starts = [text for text, _ in answers], [start for _, start in answers]
        answer_fields = {0: (None, None), 1: (texts[:1], starts[:1])}.get(len(answers), (texts, starts))
        if len(answers) == 1:
            answer_fields = (texts[0], starts[0])
        records.append(
            {"id": 3, "context": context, "question": question, "answer": answer_fields[0], "start": answer_fields[1]}
        )
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_both_layouts_give_the_same_questions(tmp_path: Path, ending: str) -> None:
    first = [(NORSE, [entry(question, answers) for _, question, answers in QUESTIONS[:3]])]
    second = [("Ada built it.", [entry(*QUESTIONS[3][1:])])]
    paths = [
        write(tmp_path / f"a.json{ending}", json.dumps(squad(first, second), indent=1)),
        write(tmp_path / f"b.jsonl{ending}", rows(QUESTIONS)),
    ]
    expected = [(context, question, tuple(answers)) for context, question, answers in QUESTIONS]
    for path in paths:
        data = read_answers(DATA.source({"text": path}))
        assert list(zip(data["context"], data["question"], data["answers"], strict=True)) == expected
        held_out = read_answers(DATA.source({"text": path}), (0.75, 1.0))
        assert held_out.columns == {role: values[3:] for role, values in data.columns.items()}
        assert held_out.location(0) == data.location(3)
    assert data.location(3) == f"{paths[1]}:4"
    assert read_answers(DATA.source({"text": paths[0]})).location(3) == f"{paths[0]}: data[1].paragraphs[0].qas[0]"
    assert answer_texts(DATA.source({"text": paths[0]})) == [
        NORSE, "Ada built it.", *(question for _, question, _ in QUESTIONS)
    ]  # fmt: skip


V1 = {key: value for key, value in entry("q", []).items() if key != "is_impossible"}


@pytest.mark.parametrize(
    ("qas", "message"),
    [
        (entry("q", [("Ada", 1)]), 'answers[0]: the answer "Ada" does not begin at character 1 of the context: '
         'found "da "; it begins at character 0'),
        (entry("q", [("Bob", 4)]), 'found "bui"; the context does not contain it'),
        (entry("q", [("Ada", 99)]), "found no text; it begins at character 0"),
        (entry("q", [("Ada", -13)]), "at character -13 of the context: found no text; it begins at character 0"),
        (entry("q", [("Ada", True)]), "the start of the answer is true; expected a character index, from 0"),
        (entry("q", [(" ", 3)]), 'the answer is " "; expected a text from the context'),
        (entry(" ", [("Ada", 0)]), "qas[0]: the question is empty"),
        (entry("q" * 1_000_001, [("Ada", 0)]), "the question has 1,000,001 characters, but at most 1,000,000 are read"),
        (entry("q", [("Ada", 0)], is_impossible=True), "is marked as impossible, but it has answers"),
        (V1, 'qas[0]: the question has no answer; if the context holds none, mark it with "is_impossible": true'),
        ({"question": "q"}, "qas[0]: there is no field 'answers'; the fields are 'question'"),
        ({"question": "q", "answers": {"text": []}}, "field 'answers' is {\"text\": []}; expected a list"),
        ("q", "qas[0]: expected an object with the field 'question', got \"q\""),
    ],
)  # fmt: skip
def test_squad_entries_that_cannot_be_used(tmp_path: Path, qas: Any, message: str) -> None:
    path = write(tmp_path / "t.json", json.dumps(squad([("Ada built it.", [qas])])))
    with pytest.raises(InputError, match=f"^{re.escape(path)}: data.0..paragraphs.0..qas.0.") as error:
        read_answers(DATA.source({"text": path}))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.json", '{"data": [\n{]}', ":2: expected JSON in the SQuAD layout, but"),
        (
            "t.json",
            rows(QUESTIONS),
            ":2: expected JSON in the SQuAD layout, but extra data; if this file holds JSON",
        ),
        ("t.json", "[]", ": expected an object with the field 'data', got []"),
        ("t.json", '{"data": []}', "expected at least one question, got none"),
        ("t.txt", "", "expected a name that ends in .json, for the SQuAD layout, or in .jsonl"),
        ("t.jsonl", '{"context": "a", "question": "b"}\n', ":1: there is no field 'answer'; the fields are"),
        ("t.jsonl", rows([("Ada", "q", [("Bob", 0)])]), ':1: the answer "Bob" does not begin at character 0 of the'),
        (
            "t.jsonl",
            rows([("Ada", "q", [])]).replace('"start": null', '"start": 3'),
            "a start for each of the 0 answers",
        ),
        ("t.jsonl", rows([(" ", "q", [])]), ":1: the context is empty"),
        ("t.jsonl", rows([("a", "q", [])]).replace('"a"', "7"), ":1: field 'context' is 7; expected a text"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(InputError, match=f"^{re.escape(path)}") as error:
        read_answers(DATA.source({"text": path}))
    assert message in str(error.value)


@pytest.mark.parametrize("table", [{"text": 3}, {"text": "a.json", "labels": "b"}, {"txt": "a.json"}])
def test_tables_that_cannot_be_meant(table: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        DATA.source(table)
