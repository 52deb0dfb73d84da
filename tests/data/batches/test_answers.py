"""Questions with answers: every layout, windows that lose nothing, spans of tokens, and every mistake."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead.data.batches.base import NO_LABEL
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.sources.answers import GoldAnswer, answer_texts, read_answers
from clearhead.data.stores.answers import NO_ANSWER, prepare_answers, token_span
from clearhead.data.stores.context_windows import OVERLAP, context_windows
from clearhead.errors import InputError
from clearhead.tasks.answer.data import parse_answer_source
from clearhead.tasks.answer.train import collate_answers
from clearhead.text.special_tokens import SpecialTokens
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer
from tests.data.batches.test_tagged import tokenizers

COLLATOR = InputCollator(SpecialTokens.from_bos_eos(2, 3), pad=0)
NORSE = 'The Normans, "héros" from\u2028Norse raiders, gave their name to Normandy.'
# Context, question, and the answers with their starts.
QUESTIONS = [
    (NORSE, "Who?", [("The Normans", 0), ("Normans", 4)]),
    (NORSE, "From whom?", [("Norse", NORSE.index("Norse"))]),
    (NORSE, "When?", []),
    ("Ada built it.", "Who built it?", [("Ada", 0)]),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))


def write(path: Path, text: str) -> str:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def entry(question: str, answers: list[tuple[str, int]], **changes: Any) -> dict[str, Any]:
    golds = [{"text": text, "answer_start": start} for text, start in answers]
    return {"question": question, "id": "a1", "answers": golds, "is_impossible": not golds, **changes}


def squad(*articles: list[tuple[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    paragraphs = [[{"context": context, "qas": qas} for context, qas in article] for article in articles]
    return {"version": "v2.0", "data": [{"title": "t", "paragraphs": part} for part in paragraphs]}


def rows(questions: list[tuple[str, str, list[tuple[str, int]]]]) -> str:
    """The questions as JSON lines: lists of several answers, one answer, and none."""
    found = []
    for context, question, answers in questions:
        texts, starts = [text for text, _ in answers], [start for _, start in answers]
        one = {0: (None, None), 1: (texts[:1], starts[:1])}.get(len(answers), (texts, starts))
        if len(answers) == 1:
            one = (texts[0], starts[0])
        found.append({"id": 3, "context": context, "question": question, "answer": one[0], "start": one[1]})
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in found)


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
        found = read_answers(parse_answer_source({"text": path}))
        assert [(one.context, one.question, one.answers) for one in found] == expected
        held_out = read_answers(parse_answer_source({"text": path}), (0.75, 1.0))
        assert held_out == found[3:]
    assert found[3].place == f"{paths[1]}:4"
    assert read_answers(parse_answer_source({"text": paths[0]}))[3].place == f"{paths[0]}: data[1].paragraphs[0].qas[0]"
    assert answer_texts(parse_answer_source({"text": paths[0]})) == [
        NORSE, "Ada built it.", *(question for _, question, _ in QUESTIONS)
    ]  # fmt: skip


V1 = {key: value for key, value in entry("q", []).items() if key != "is_impossible"}


@pytest.mark.parametrize(
    ("qas", "message"),
    [
        (entry("q", [("Ada", 1)]), 'answers[0]: the answer "Ada" does not begin at character 1 of the context, where'
         ' "da " stands; it stands at 0'),
        (entry("q", [("Bob", 4)]), 'where "bui" stands; it is not in the context at all'),
        (entry("q", [("Ada", 99)]), "where nothing is; it stands at 0"),
        (entry("q", [("Ada", -13)]), "at character -13 of the context, where nothing is; it stands at 0"),
        (entry("q", [("Ada", True)]), "the start of the answer is true; expected a number of characters, from 0"),
        (entry("q", [(" ", 3)]), 'the answer is " "; expected a text that stands in the context'),
        (entry(" ", [("Ada", 0)]), "qas[0]: the question is empty"),
        (entry("q" * 1_000_001, [("Ada", 0)]), "the question has 1,000,001 characters, but at most 1,000,000 are read"),
        (entry("q", [("Ada", 0)], is_impossible=True), "is marked as impossible, but it has answers"),
        (V1, 'qas[0]: the question has no answer; where the context holds none, SQuAD 2.0 says "is_impossible": true'),
        ({"question": "q"}, "qas[0]: there is no field 'answers'; the fields are 'question'"),
        ({"question": "q", "answers": {"text": []}}, "field 'answers' is {\"text\": []}; expected a list"),
        ("q", "qas[0]: expected an object with the field 'question', received \"q\""),
    ],
)  # fmt: skip
def test_squad_entries_that_cannot_be_used(tmp_path: Path, qas: Any, message: str) -> None:
    path = write(tmp_path / "t.json", json.dumps(squad([("Ada built it.", [qas])])))
    with pytest.raises(InputError, match=f"^{re.escape(path)}: data.0..paragraphs.0..qas.0.") as error:
        read_answers(parse_answer_source({"text": path}))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.json", '{"data": [\n{]}', ":2: expected JSON in the SQuAD layout, but"),
        (
            "t.json",
            rows(QUESTIONS),
            ":2: expected JSON in the SQuAD layout, but extra data; the name of a file of JSON",
        ),
        ("t.json", "[]", ": expected an object with the field 'data', received []"),
        ("t.json", '{"data": []}', "expected at least one question, found none"),
        ("t.txt", "", "expected a name that ends in .json, for the SQuAD layout, or in .jsonl"),
        ("t.jsonl", '{"context": "a", "question": "b"}\n', ":1: there is no field 'answer'; the fields are"),
        ("t.jsonl", rows([("Ada", "q", [("Bob", 0)])]), ':1: the answer "Bob" does not begin at character 0 of the'),
        ("t.jsonl", rows([("Ada", "q", [])]).replace('"start": null', '"start": 3'), "a start for each of 0 answers"),
        ("t.jsonl", rows([(" ", "q", [])]), ":1: the context is empty"),
        ("t.jsonl", rows([("a", "q", [])]).replace('"a"', "7"), ":1: field 'context' is 7; expected a text"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(InputError, match=f"^{re.escape(path)}") as error:
        read_answers(parse_answer_source({"text": path}))
    assert message in str(error.value)


@pytest.mark.parametrize("table", [{"text": 3}, {"text": "a.json", "labels": "b"}, {"txt": "a.json"}])
def test_tables_that_cannot_be_meant(table: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        parse_answer_source(table)


def test_windows_hold_every_token_and_every_short_answer_whole() -> None:
    draw = random.Random(1)
    for _ in range(400):
        num_context, longest, num_question = draw.randint(1, 900), draw.randint(12, 500), draw.randint(1, 5)
        windows = context_windows(num_question, num_context, longest=longest, num_special=3)
        room = longest - num_question - 3
        assert all(0 < len(window) <= room for window in windows)
        assert sorted({token for window in windows for token in window}) == list(range(num_context))
        length = draw.randint(1, min(OVERLAP, room // 2, num_context))
        first = draw.randint(0, num_context - length)
        assert any(window.start <= first and first + length <= window.stop for window in windows)
        assert len(windows) == 1 or num_context > room


def test_a_question_that_leaves_no_room() -> None:
    with pytest.raises(InputError, match="the question has 8 tokens, and 12 are read together with the text"):
        context_windows(8, 5, longest=12, num_special=3)


@pytest.mark.parametrize("tokenizer", tokenizers(), ids=lambda tokenizer: tokenizer.kind)
def test_the_tokens_of_an_answer_cover_it_and_no_more_than_they_must(tokenizer: Tokenizer) -> None:
    draw = random.Random(4)
    context = " ".join("".join(draw.choices("abcdefgh.,", k=draw.randint(1, 7))) for _ in range(30))
    spans = np.array(tokenizer.encode_with_spans(context)[1])
    for _ in range(200):
        start = draw.randrange(len(context))
        text = context[start : start + draw.randint(1, 20)]
        if not text.strip():
            continue
        found = token_span(spans, GoldAnswer(text, start))
        assert found is not None
        first, last = found
        begin, end = start + len(text) - len(text.lstrip()), start + len(text.rstrip())
        assert spans[first, 0] <= begin and end <= spans[last, 1]
        # Without its first or its last token it would be cut.
        assert spans[first, 1] > start and spans[last, 0] < start + len(text)


def questions_about(texts: int, draw: random.Random) -> list[tuple[str, str, list[tuple[str, int]]]]:
    found = []
    for _ in range(texts):
        context = " ".join("".join(draw.choices("abcdefgh", k=draw.randint(1, 5))) for _ in range(draw.randint(1, 40)))
        start = draw.randrange(len(context))
        text = context[start : start + draw.randint(1, 9)].strip() or context[0]
        start = context.index(text)
        found.append((context, "what is it?"[: draw.randint(1, 11)], [(text, start)] if draw.random() < 0.8 else []))
    return found


@pytest.mark.parametrize("kind", ["character", "bpe"])
def test_a_batch_labels_the_answer_where_the_window_has_it(tmp_path: Path, kind: str) -> None:
    data = questions_about(60, random.Random(5))
    source = parse_answer_source({"text": write(tmp_path / "t.jsonl", rows(data))})
    texts = answer_texts(source)
    tokenizer = train_tokenizer(kind, texts, vocab_size={"character": 50, "bpe": 60}[kind])
    store = prepare_answers(source, tokenizer, max_length=31)
    assert max(store.lengths) <= 31 and len(store) > len(data)
    batch = collate_answers(store, np.arange(len(store)), COLLATOR)
    seen: dict[int, list[bool]] = {}
    for index, row in enumerate(store.rows.tolist()):
        context, _, answers = data[row]
        assert store.context(row) == context and store.golds(row) == [text for text, _ in answers]
        labels, ids = batch.labels[index], batch.ids[index].tolist()
        num_question = len(store.questions[row])
        front, size = num_question + 2, len(store.ids(index)[1])
        assert tokenizer.decode(ids[front : front + size]) in tokenizer.decode(
            store.contexts[store.context_of[row]].tolist()
        )
        possible = [place for place in range(len(ids)) if labels[place, 0] != NO_LABEL]
        assert possible == [0, *range(front, front + size)] and ((labels == NO_LABEL).sum(1) % 2 == 0).all()
        (first,), (last,) = ((labels[:, side] == 1).nonzero()[:, 0].tolist() for side in (0, 1))
        seen.setdefault(row, []).append(first > 0)
        assert (first > 0) == (last > 0) and first <= last
        if first:
            text, start = answers[0]
            inside = store.spans[store.borders[index, 0] :]
            assert inside[first - front, 0] <= start and start + len(text) <= inside[last - front, 1]
            spoken = tokenizer.decode(ids[first : last + 1])
            assert text in spoken or kind == "bpe"
    # Nine characters are shorter than what windows share, so that each answer is in one of them.
    assert [any(parts) for parts in seen.values()] == [bool(answers) for _, _, answers in data]
    assert store.report.split == 0 and store.report.unread == 0
    assert store.report.unanswerable == sum(not answers for _, _, answers in data)


def test_the_report_counts_what_a_model_does_not_see(tmp_path: Path) -> None:
    long, context = "q" * 40, "a" * 50
    data = [(context, "q", [(context, 0)]), (context, long, []), (context, "q", [("a", 3)]), (context, "é", [])]
    source = parse_answer_source({"text": write(tmp_path / "t.jsonl", rows(data))})
    tokenizer = train_tokenizer("character", [context, long], vocab_size=20)
    store = prepare_answers(source, tokenizer, max_length=20)
    report = store.report
    assert (report.questions, report.contexts, report.unanswerable, report.shortened) == (4, 1, 2, 1)
    assert (report.long, report.split, report.answer_tokens) == (4, 1, 50)
    assert max(store.questions.lengths) == 20 // 2 - 3
    assert not any(first != NO_ANSWER for first, _ in store.labels[store.rows == 0])
    assert "1 with an answer longer than the overlap of windows" in str(report)
    with pytest.raises(InputError, match="max_length is 9; expected at least 10"):
        prepare_answers(source, tokenizer, max_length=9)
