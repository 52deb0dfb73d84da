"""Tokenized questions with windows of their contexts: stored once and memory-mapped from then on.

Shape suffixes: T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Int64, Integer
from numpy import ndarray

from clearhead.data.sources.answers import AnswerSource, GoldAnswer, Question, read_answers
from clearhead.data.sources.tables import WHOLE, Share
from clearhead.data.stores.arrays import (
    Arrays,
    ArrayStore,
    Ragged,
    Rows,
    encode_texts,
    id_dtype,
    pack,
    write_arrays,
)
from clearhead.data.stores.cache import load_or_make
from clearhead.data.stores.context_windows import context_windows
from clearhead.errors import InputError
from clearhead.text.tokenizer import Tokenizer

NO_ANSWER = -1
"""The first and the last token of an answer that is not in the window."""


@dataclass(frozen=True)
class AnswerReport:
    """What became of the questions of a source.

    Args:
        questions: all of them.
        contexts: all of them, each once.
        windows: pairs of a question and a window of its context.
        unanswerable: questions without an answer.
        long: questions whose context is read in several windows.
        split: questions whose answer is in no window as a whole, so that no window shows it.
        shortened: questions that are truncated.
        unread: questions without a window, because question, context or answer has no token.
        max_length: the longest sequence that was allowed, special ids included.
        answer_tokens: tokens of the longest answer; 0 where there is none.
    """

    questions: int
    contexts: int
    windows: int
    unanswerable: int
    long: int
    split: int
    shortened: int
    unread: int
    max_length: int
    answer_tokens: int

    def __str__(self) -> str:
        parts = [f"{self.questions:,} questions about {self.contexts:,} contexts read"]
        if self.unanswerable:
            parts.append(f"{self.unanswerable:,} without an answer")
        if self.long:
            parts.append(f"{self.long:,} with a context longer than {self.max_length:,} tokens, read in windows")
        if self.split:
            parts.append(f"{self.split:,} with an answer longer than the overlap of windows")
        if self.shortened:
            parts.append(f"{self.shortened:,} longer than half of {self.max_length:,} tokens and cut")
        if self.unread:
            parts.append(f"{self.unread:,} without a token and left out")
        return f"{', '.join(parts)}; {self.windows:,} windows"


class AnswerStore(ArrayStore):
    """Tokenized questions, and windows of their contexts with the place of the answer.

    Args:
        folder: the store's folder.
        tokenizer: what the texts were tokenized with.

    Attributes:
        report: what became of the questions.
        questions: the ids of each question, without special ids.
        contexts: the ids of each context, without special ids.
        context_of: the context of each question.
        spans: for each id of all contexts the characters that it stands for, as places in its context.
        rows: the question of each window; the windows of a question are neighbours.
        borders: for each window its first id among those of all contexts, and the id behind its last one.
        labels: for each window the first and the last token of the answer, counted from the start of the window;
            NO_ANSWER where it has none.
    """

    contents: ClassVar[str] = "questions and contexts"

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        super().__init__(folder)
        self.report: AnswerReport = AnswerReport(**self.record["report"])
        self.questions, self.contexts = self.ragged("question"), self.ragged("context")
        self._texts, self._golds = self.ragged("text"), self.ragged("gold")
        self.texts = (self.questions, self.contexts)
        self.context_of, self.spans = self.arrays["context_of"], self.arrays["spans"]
        self.rows: Rows = self.arrays["rows"]
        self.borders, self.labels = self.arrays["borders"], self.arrays["labels"]
        self._num_special = tokenizer.special_tokens.num_added(paired=True)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> Rows:
        """The length of each window with its question, special ids included."""
        lengths: Rows = self.questions.lengths[self.rows] + np.diff(self.borders, axis=1)[:, 0] + self._num_special
        return lengths

    @property
    def input_lengths(self) -> tuple[Rows]:
        """The lengths of what the model reads of each window."""
        return (self.lengths,)

    def ids(self, index: int | np.int64) -> tuple[Integer[ndarray, " question"], Integer[ndarray, " context"]]:
        """Return the ids of the question and of the context of one window."""
        start, end = self.borders[index]
        return self.questions[self.rows[index]], self.contexts.ids[start:end]

    def context(self, question: int) -> str:
        """Return the text of a question's context."""
        return self._texts[self.context_of[question]].tobytes().decode()

    def golds(self, question: int) -> list[str]:
        """Return the right answers to a question; none where the context holds none."""
        golds: list[str] = json.loads(self._golds[question].tobytes())
        return golds


def prepare_answers(
    source: AnswerSource, tokenizer: Tokenizer, *, max_length: int, share: Share = WHOLE
) -> AnswerStore:
    """Tokenize questions and contexts, or open what an earlier run made of the same content.

    Args:
        source: where they come from.
        tokenizer: turns them into ids.
        max_length: the longest sequence in tokens, special ids included; a longer context is read in windows, and a
            question that is longer than half of it is truncated.
        share: which part of the source, from one share of its questions to another.

    Raises:
        InputError: the source or an answer is unusable, or nothing has a token.
        RunFailure: the cache cannot be written.
    """
    # The longest question leaves half of the rest to the context, and a window has at least two tokens.
    shortest = 2 * (tokenizer.special_tokens.num_added(paired=True) + 2)
    if max_length < shortest:
        raise InputError(f"max_length is {max_length}; expected at least {shortest}, for a question and its context")
    return load_or_make(
        "answers",
        [source.identity(), tokenizer.fingerprint, max_length, share],
        lambda folder: AnswerStore(folder, tokenizer),
        lambda folder: _write(folder, read_answers(source, share), tokenizer, max_length),
    )


def token_span(spans_T2: Integer[ndarray, "tokens 2"], gold: GoldAnswer) -> tuple[int, int] | None:
    """Return the first and the last token of an answer: all that stand for one of its characters.

    Args:
        spans_T2: for each token of the context the place of its first character, and the place behind its last one.
        gold: the answer.

    Returns:
        The two tokens, counted from 0; None if no token stands for a character of the answer.
    """
    end = gold.start + len(gold.text)
    places = np.flatnonzero((spans_T2[:, 0] < end) & (spans_T2[:, 1] > gold.start))
    return (int(places[0]), int(places[-1])) if len(places) else None


def _write(folder: Path, questions: Sequence[Question], tokenizer: Tokenizer, max_length: int) -> None:
    texts = list(dict.fromkeys(one.context for one in questions))
    numbers = {text: number for number, text in enumerate(texts)}
    context_of = np.array([numbers[one.context] for one in questions], dtype=np.int64)
    encoded = [tokenizer.encode_with_spans(text) for text in texts]
    contexts = pack([ids for ids, _ in encoded], id_dtype(tokenizer))
    spans = np.array([span for _, found in encoded for span in found], dtype=np.int32).reshape(-1, 2)
    asked = encode_texts([one.question for one in questions], tokenizer)
    limit = np.minimum(asked.lengths, max_length // 2 - tokenizer.special_tokens.num_added(paired=True))
    windows = _Windows(contexts, spans)
    for number, question in enumerate(questions):
        windows.add(number, question, int(context_of[number]), int(limit[number]), max_length, tokenizer)
    if not windows.rows:
        raise InputError(f"{questions[0].place}: the tokenizer has no token for any question from here on")
    report = AnswerReport(
        questions=len(questions),
        contexts=len(texts),
        windows=len(windows.rows),
        unanswerable=sum(not one.answers for one in questions),
        long=windows.num_long,
        split=windows.num_split,
        shortened=int((limit < asked.lengths).sum()),
        unread=len(questions) - len(set(windows.rows)),
        max_length=max_length,
        answer_tokens=windows.longest,
    )
    arrays: Arrays = {
        "question": asked.truncate(limit, np.ones(len(questions), dtype=bool)),
        "context": contexts,
        "context_of": context_of,
        "spans": spans,
        "text": _bytes(texts),
        "gold": _bytes([json.dumps([gold.text for gold in one.answers]) for one in questions]),
        "rows": np.array(windows.rows, dtype=np.int64),
        "borders": np.array(windows.borders, dtype=np.int64),
        "labels": np.array(windows.labels, dtype=np.int32),
    }
    write_arrays(folder, arrays, {"report": asdict(report)})


class _Windows:
    """Collects the windows of all questions.

    Args:
        contexts, spans: as of `AnswerStore`.
    """

    def __init__(self, contexts: Ragged, spans: Int64[ndarray, "tokens 2"] | Integer[ndarray, "tokens 2"]) -> None:
        self._contexts, self._spans = contexts, spans
        self.rows: list[int] = []
        self.borders: list[tuple[int, int]] = []
        self.labels: list[tuple[int, int]] = []
        self.num_long = self.num_split = self.longest = 0

    def add(
        self, number: int, question: Question, context: int, num_question: int, max_length: int, tokenizer: Tokenizer
    ) -> None:
        """Add the windows of one question, unless its question, context or answer has no token."""
        begin, behind = map(int, self._contexts.offsets[context : context + 2])
        # A model learns the first of several right answers.
        found = token_span(self._spans[begin:behind], question.answers[0]) if question.answers else None
        if not num_question or begin == behind or (question.answers and found is None):
            return
        first, last = found or (NO_ANSWER, NO_ANSWER)
        windows = context_windows(
            num_question,
            behind - begin,
            longest=max_length,
            num_special=tokenizer.special_tokens.num_added(paired=True),
        )
        has_answer = [found is not None and window.start <= first and last < window.stop for window in windows]
        for window, is_inside in zip(windows, has_answer, strict=True):
            self.rows.append(number)
            self.borders.append((begin + window.start, begin + window.stop))
            place = (first - window.start, last - window.start) if is_inside else (NO_ANSWER, NO_ANSWER)
            self.labels.append(place)
        self.num_long += len(windows) > 1
        self.num_split += found is not None and not any(has_answer)
        self.longest = max(self.longest, last - first + 1 if found is not None else 0)


def _bytes(texts: Sequence[str]) -> Ragged:
    """Return texts as rows of UTF-8 bytes."""
    encoded = [text.encode() for text in texts]
    lengths = np.array([len(part) for part in encoded], dtype=np.int64)
    return Ragged.of(np.frombuffer(b"".join(encoded), dtype=np.uint8), lengths)
