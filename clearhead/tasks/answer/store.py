"""Stores of tokenized questions and contexts, with the windows of contexts and the tokens of the answers.

Shape suffixes: T tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer
from numpy import ndarray

from clearhead.base.errors import InputError, argument
from clearhead.data.arrays import Ragged, Rows, encode_texts, id_dtype, pack
from clearhead.data.sources.tables import WHOLE, DataTable, Share, TableSource
from clearhead.data.stores.store import Arrays, Encoded, Store, StoreKind, format_counts, prepare_store
from clearhead.tasks.answer.data import GoldAnswer, read_answers
from clearhead.text.tokenizer import Tokenizer

NO_ANSWER = -1
"""The label in place of the first and the last token, if the answer is not in the window."""
_NO_ANSWER_SPAN = (NO_ANSWER, NO_ANSWER)
# The usual sizes, in tokens, of models for question answering: a longer context is read in overlapping windows.
WINDOW, OVERLAP = 384, 128


def _report(store: Store) -> str:
    counts = store.facts["report"]
    longest = f"{counts['max_length']:,} tokens"
    words = {
        "unanswerable": "without an answer",
        "long": f"with a context longer than {longest}, read in windows",
        "split": "with an answer longer than the overlap of windows",
        "shortened": f"longer than half of {longest} and cut",
        "unread": "without a token and left out",
    }
    read = f"{counts['questions']:,} questions about {counts['contexts']:,} contexts read"
    return ", ".join([read, *format_counts(counts, words)]) + f"; {counts['windows']:,} windows"


def _lengths(store: Store) -> list[Rows]:
    questions, _ = store.texts
    return [questions.lengths[store.arrays["rows"]] + np.diff(store.arrays["borders"], axis=1)[:, 0]]


ANSWERS = StoreKind("answers", "questions and contexts", ("question", "context"), _report, _lengths)
"""Kind of store for questions; its texts are questions and contexts.

Arrays of questions and contexts:

- "context_of": the context of each question.
- "spans": for each id of all contexts, its first character and the character after its last one.
- "text", "gold": the contexts and the answers in UTF-8.

An example is a window of a context, with these arrays:

- "rows": the question of each window; windows of one question are neighbours.
- "borders": the first id of the window among those of all contexts, and the id after its last one.
- "labels": the first and the last token of the answer in the window, or NO_ANSWER.
"""


def window_ids(
    store: Store, index: int | np.int64
) -> tuple[Integer[ndarray, " question"], Integer[ndarray, " context"]]:
    """Return the ids of the question and of the context of one window."""
    questions, contexts = store.texts
    start, end = store.arrays["borders"][index]
    return questions[store.arrays["rows"][index]], contexts.ids[start:end]


def context_text(store: Store, question: int) -> str:
    """Return the text of the context of a question."""
    return store.ragged_rows("text")[store.arrays["context_of"][question]].tobytes().decode()


def gold_texts(store: Store) -> list[list[str]]:
    """Return the list of right answers to each question, empty if the context holds no answer."""
    golds = store.ragged_rows("gold")
    return [json.loads(golds[question].tobytes()) for question in range(len(golds))]


def prepare_answers(source: TableSource, tokenizer: Tokenizer, *, max_length: int, share: Share = WHOLE) -> Store:
    """Tokenize questions and contexts, or open the cached store of the same content.

    Args:
        source: the source of the data.
        tokenizer: the tokenizer of the run.
        max_length: the longest sequence in tokens, special ids included. A longer context is read in windows, and a
            question longer than half of `max_length` is truncated.
        share: the share of the questions to read, see `read_table`.

    Raises:
        InputError: the source or an answer is unusable, or no example has a token in both question and context.
        RunFailure: the cache cannot be written.
    """
    num_special = tokenizer.special_tokens.num_added(paired=True)
    # The longest question leaves half of the remaining tokens to the context, and a window has at least two tokens.
    shortest = 2 * (num_special + 2)
    if max_length < shortest:
        raise InputError(f"max_length is {max_length}; expected at least {shortest}, to fit a question and its context")
    inputs = [source.identity(), tokenizer.fingerprint, max_length, share]

    def encode() -> Encoded:
        return _encode(read_answers(source, share), tokenizer, max_length, num_special)

    return prepare_store(ANSWERS, inputs, encode, special=(num_special,))


def token_span(spans_T2: Integer[ndarray, "tokens 2"], gold: GoldAnswer) -> tuple[int, int] | None:
    """Return the indices of the first and the last context token that overlap with the answer.

    Args:
        spans_T2: the first character of each token of the context, and the character after its last one.
        gold: the right answer.

    Returns:
        The indices of the two tokens, counted from 0; None if no token covers a character of the answer.
    """
    end = gold.start + len(gold.text)
    tokens = np.flatnonzero((spans_T2[:, 0] < end) & (spans_T2[:, 1] > gold.start))
    return (int(tokens[0]), int(tokens[-1])) if len(tokens) else None


def context_windows(
    num_question: int, num_context: int, *, longest: int, num_special: int, overlap: int | None = None
) -> list[range]:
    """Return the token ranges of the windows of a context; each window fits together with the question.

    Neighbouring windows share `OVERLAP` tokens, or half of a shorter window. A span of at most one token more than
    this is complete in one of them.

    Args:
        num_question, num_context: the numbers of tokens in the question and in the context.
        longest: the maximum number of tokens that the model reads at once, special tokens included.
        num_special: the number of special tokens around a pair.
        overlap: the number of tokens that neighbouring windows share. None means `OVERLAP` with its limits.

    Raises:
        InputError: the question leaves no room for the context, or windows would overlap in all their tokens.
    """
    room = longest - num_question - num_special
    if room < 2:
        raise InputError(
            f"the question has {num_question} tokens, but must fit into {longest} with its context; shorten it"
        )
    if overlap is not None and not 0 <= overlap < room:
        raise InputError(
            argument("doc_stride") + f" must be 0 to {room - 1}, as a window holds {room} tokens, got {overlap}"
        )
    # A long question leaves shorter windows, which overlap less.
    overlap = min(OVERLAP, longest // 2, room // 2) if overlap is None else overlap
    windows = [range(first, min(first + room, num_context)) for first in range(0, num_context, room - overlap)]
    return windows[: [window.stop for window in windows].index(num_context) + 1]


def _encode(data: DataTable, tokenizer: Tokenizer, max_length: int, num_special: int) -> Encoded:
    texts = list(dict.fromkeys(data["context"]))
    numbers = {text: number for number, text in enumerate(texts)}
    context_of = np.array([numbers[context] for context in data["context"]], dtype=np.int64)
    ids, spans = zip(*map(tokenizer.encode_with_spans, texts), strict=True)
    contexts = pack(ids, id_dtype(tokenizer))
    spans_T2 = np.array(list(itertools.chain.from_iterable(spans)), dtype=np.int32).reshape(-1, 2)
    whole = encode_texts(data["question"], tokenizer)
    limit = np.minimum(whole.lengths, max_length // 2 - num_special)
    questions = whole.truncate(limit, np.ones(len(data), dtype=bool))
    windows = _WindowCollector(contexts, spans_T2, max_length, num_special)
    for number, golds in enumerate(data["answers"]):
        windows.add(number, golds, int(context_of[number]), int(limit[number]))
    if not windows.rows:
        raise InputError(
            f"{data.location(0)}: the tokenizer produces no token for any question from here on; check the tokenizer "
            "and the data"
        )
    report = {
        "questions": len(data),
        "contexts": len(texts),
        "windows": len(windows.rows),
        "unanswerable": data["answers"].count(()),
        "long": windows.num_long,
        "split": windows.num_split,
        "shortened": int((limit < whole.lengths).sum()),
        "unread": len(data) - len(set(windows.rows)),
        "max_length": max_length,
        "answer_tokens": windows.longest,
    }
    golds = [json.dumps([gold.text for gold in golds]) for golds in data["answers"]]
    arrays: Arrays = {
        "question": questions,
        "context": contexts,
        "context_of": context_of,
        "spans": spans_T2,
        "text": _bytes(texts),
        "gold": _bytes(golds),
        "rows": np.array(windows.rows, dtype=np.int64),
        "borders": np.array(windows.borders, dtype=np.int64),
        "labels": np.array(windows.labels, dtype=np.int32),
    }
    return arrays, {"report": report}


class _WindowCollector:
    """Collects the windows of all questions for a store.

    Args:
        contexts: the ids of each context.
        spans_T2: the character span of each id of all contexts.
        max_length: the maximum number of ids that the model reads at once, special ids included.
        num_special: the number of special ids around a question and a window.
    """

    def __init__(
        self, contexts: Ragged, spans_T2: Integer[ndarray, "tokens 2"], max_length: int, num_special: int
    ) -> None:
        self._contexts, self._spans_T2 = contexts, spans_T2
        self._max_length, self._num_special = max_length, num_special
        self.rows: list[int] = []
        self.borders: list[tuple[int, int]] = []
        self.labels: list[tuple[int, int]] = []
        self.num_long = self.num_split = self.longest = 0

    def add(self, number: int, golds: Sequence[GoldAnswer], context: int, num_question: int) -> None:
        """Add the windows of one question, unless the question, its context or its answer has no token."""
        begin, end = map(int, self._contexts.offsets[context : context + 2])
        # Of several right answers the model learns the first.
        answer = token_span(self._spans_T2[begin:end], golds[0]) if golds else None
        if not num_question or begin == end or (golds and answer is None):
            return
        windows = context_windows(num_question, end - begin, longest=self._max_length, num_special=self._num_special)
        labels = [_label(answer, window) for window in windows]
        self.rows += [number] * len(windows)
        self.borders += [(begin + window.start, begin + window.stop) for window in windows]
        self.labels += labels
        self.num_long += len(windows) > 1
        if answer is not None:
            self.num_split += all(label == _NO_ANSWER_SPAN for label in labels)
            self.longest = max(self.longest, answer[1] - answer[0] + 1)


def _label(answer: tuple[int, int] | None, window: range) -> tuple[int, int]:
    """Return an answer's first and last token within a window, or NO_ANSWER twice if the window lacks a part of it."""
    if answer is None or answer[0] < window.start or answer[1] >= window.stop:
        return _NO_ANSWER_SPAN
    return answer[0] - window.start, answer[1] - window.start


def _bytes(texts: Sequence[str]) -> Ragged:
    """Return a ragged array of the texts in UTF-8, one row of bytes per text."""
    encoded = [text.encode() for text in texts]
    lengths = np.array(list(map(len, encoded)), dtype=np.int64)
    return Ragged.of(np.frombuffer(b"".join(encoded), dtype=np.uint8), lengths)
