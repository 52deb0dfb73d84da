"""Windows that lose nothing, spans of tokens, and batches that label the answer."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from clearhead.base.errors import InputError
from clearhead.data.batches.base import NO_LABEL
from clearhead.data.batches.inputs import InputCollator
from clearhead.tasks.answer.data import DATA, GoldAnswer, answer_texts
from clearhead.tasks.answer.store import (
    NO_ANSWER,
    OVERLAP,
    context_text,
    context_windows,
    gold_texts,
    prepare_answers,
    token_span,
    window_ids,
)
from clearhead.tasks.answer.train import collate_answers
from clearhead.text.special_tokens import SpecialTokens
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.tokenizer_training import train_tokenizer
from tests.tasks.answer.test_data import rows, write
from tests.tasks.tag.test_splitting import tokenizers

COLLATOR = InputCollator(SpecialTokens.from_bos_eos(2, 3), pad=0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))


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
        span = token_span(spans, GoldAnswer(text, start))
        assert span is not None
        first, last = span
        begin, end = start + len(text) - len(text.lstrip()), start + len(text.rstrip())
        assert spans[first, 0] <= begin and end <= spans[last, 1]
        # Without its first or its last token it would be cut.
        assert spans[first, 1] > start and spans[last, 0] < start + len(text)


def questions_about(texts: int, draw: random.Random) -> list[tuple[str, str, list[tuple[str, int]]]]:
    questions = []
    for _ in range(texts):
        context = " ".join("".join(draw.choices("abcdefgh", k=draw.randint(1, 5))) for _ in range(draw.randint(1, 40)))
        start = draw.randrange(len(context))
        text = context[start : start + draw.randint(1, 9)].strip() or context[0]
        start = context.index(text)
        questions.append(
            (context, "what is it?"[: draw.randint(1, 11)], [(text, start)] if draw.random() < 0.8 else [])
        )
    return questions


@pytest.mark.parametrize("kind", ["character", "bpe"])
def test_a_batch_labels_the_answer_where_the_window_has_it(tmp_path: Path, kind: str) -> None:
    data = questions_about(60, random.Random(5))
    source = DATA.source({"text": write(tmp_path / "t.jsonl", rows(data))})
    texts = answer_texts(source)
    tokenizer = train_tokenizer(kind, texts, vocab_size={"character": 50, "bpe": 60}[kind])
    store = prepare_answers(source, tokenizer, max_length=31)
    assert store.longest[0] <= 31 and len(store) > len(data)
    batch = collate_answers(store, np.arange(len(store)), COLLATOR)
    seen: dict[int, list[bool]] = {}
    assert gold_texts(store) == [[text for text, _ in answers] for _, _, answers in data]
    questions, contexts = store.texts
    for index, row in enumerate(store.arrays["rows"].tolist()):
        context, _, answers = data[row]
        assert context_text(store, row) == context
        labels, ids = batch.labels[index], batch.ids[index].tolist()
        front, size = len(questions[row]) + 2, len(window_ids(store, index)[1])
        whole = tokenizer.decode(contexts[store.arrays["context_of"][row]].tolist())
        assert tokenizer.decode(ids[front : front + size]) in whole
        possible = [position for position in range(len(ids)) if labels[position, 0] != NO_LABEL]
        assert possible == [0, *range(front, front + size)] and ((labels == NO_LABEL).sum(1) % 2 == 0).all()
        (first,), (last,) = ((labels[:, side] == 1).nonzero()[:, 0].tolist() for side in (0, 1))
        seen.setdefault(row, []).append(first > 0)
        assert (first > 0) == (last > 0) and first <= last
        if first:
            text, start = answers[0]
            inside = store.arrays["spans"][store.arrays["borders"][index, 0] :]
            assert inside[first - front, 0] <= start and start + len(text) <= inside[last - front, 1]
            spoken = tokenizer.decode(ids[first : last + 1])
            assert text in spoken or kind == "bpe"
    # Nine characters are shorter than what windows share, so that each answer is in one of them.
    assert [any(parts) for parts in seen.values()] == [bool(answers) for _, _, answers in data]
    counts = store.facts["report"]
    assert (counts["split"], counts["unread"]) == (0, 0)
    assert counts["unanswerable"] == sum(not answers for _, _, answers in data)


def test_the_report_counts_what_a_model_does_not_see(tmp_path: Path) -> None:
    long, context = "q" * 40, "a" * 50
    data = [(context, "q", [(context, 0)]), (context, long, []), (context, "q", [("a", 3)]), (context, "é", [])]
    source = DATA.source({"text": write(tmp_path / "t.jsonl", rows(data))})
    tokenizer = train_tokenizer("character", [context, long], vocab_size=20)
    store = prepare_answers(source, tokenizer, max_length=20)
    assert store.report == (
        "4 questions about 1 contexts read, 2 without an answer, 4 with a context longer than 20 tokens, read in "
        "windows, 1 with an answer longer than the overlap of windows, 1 longer than half of 20 tokens and cut; "
        f"{len(store)} windows"
    )
    assert store.facts["report"]["answer_tokens"] == 50
    assert store.texts[0].longest == 20 // 2 - 3
    assert not any(first != NO_ANSWER for first, _ in store.arrays["labels"][store.arrays["rows"] == 0])
    with pytest.raises(InputError, match="max_length is 9; expected at least 10"):
        prepare_answers(source, tokenizer, max_length=9)
