"""Predictions and metrics of question answering: spans of a context, or "no answer".

Shape suffixes: W windows of the context, T tokens of a window, K lengths of an answer.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.base.errors import InputError, argument
from clearhead.base.hooks import is_watching, naming_texts
from clearhead.base.printing import Printed
from clearhead.base.progress import message
from clearhead.core import Transformer
from clearhead.data.batches.inputs import Ids, InputCollator, ModelInputs
from clearhead.data.feed import computes_late
from clearhead.data.stores.store import Store
from clearhead.generate.batching import device_of
from clearhead.generate.scoring.result import Measures
from clearhead.spec.tasks.record import TaskRecord
from clearhead.tasks.answer.data import DATA
from clearhead.tasks.answer.store import (
    NO_ANSWER,
    WINDOW,
    context_text,
    context_windows,
    gold_texts,
    prepare_answers,
    window_ids,
)
from clearhead.tasks.evaluate.options import EvaluatedModel, EvaluateOptions
from clearhead.tasks.outputs import TextBlock, batch_outputs, check_finite, max_input_length
from clearhead.tasks.use import collate_texts, finite_or_none
from clearhead.text.long_texts import MOST_CHARACTERS, warn_of_long_texts
from clearhead.text.spans import Span
from clearhead.text.tokenizer import Tokenizer

# The longest answer, in tokens, if the task record does not contain the length of the training answers.
MAX_ANSWER_TOKENS = 15
# The number of questions whose windows a GPU reads together.
_PAIRS = 256

WindowScores = tuple[int, Float[Tensor, " tokens"], Float[Tensor, " tokens"]]
"""The number of a window, and the log-probabilities that the answer starts and that it ends at each token."""


@dataclass(frozen=True, repr=False)
class Answer(Printed):
    """An answer: a span of the context, or "no answer" if the text is empty.

    Args:
        text: the text of the span.
        score: the probability of its start times the probability of its end, 0 to 1, in the window that scores it best.
            For "no answer", the lowest score over all windows. With whole words, scores of the same text are added.
        start, end: the character offsets in the context; `end` is exclusive.
    """

    text: str
    score: float
    start: int
    end: int


def answer(
    module: Transformer,
    tokenizer: Tokenizer,
    record: TaskRecord,
    question: str,
    context: str,
    *,
    top_k: int = 1,
    allow_no_answer: bool = False,
    max_tokens: int | None = None,
    doc_stride: int | None = None,
    align_to_words: bool = False,
    batch_size: int | None = None,
) -> list[Answer]:
    """Return the spans of a context that answer a question, best first.

    Args:
        module, tokenizer, record: the arguments of `answer_pairs`.
        question, context: the two texts, not empty.
        top_k, allow_no_answer, max_tokens, doc_stride, align_to_words, batch_size: the arguments of `answer_pairs`.
    """
    return answer_pairs(
        module,
        tokenizer,
        record,
        [(question, context)],
        top_k=top_k,
        allow_no_answer=allow_no_answer,
        max_tokens=max_tokens,
        doc_stride=doc_stride,
        align_to_words=align_to_words,
        batch_size=batch_size,
    )[0]


def answer_pairs(
    module: Transformer,
    tokenizer: Tokenizer,
    record: TaskRecord,
    pairs: Sequence[tuple[str, str]],
    *,
    top_k: int = 1,
    allow_no_answer: bool = False,
    max_tokens: int | None = None,
    doc_stride: int | None = None,
    align_to_words: bool = False,
    batch_size: int | None = None,
) -> list[list[Answer]]:
    """Return, for each pair of a question and a context, the spans of the context that answer it, best first.

    A context that is longer than the model's window is read in overlapping windows. On a GPU the windows of many pairs
    are read together, elsewhere those of one pair.

    Args:
        module: a model whose head scores each token as start and as end of an answer; it runs in evaluation mode.
        tokenizer: the tokenizer of the model.
        record: the task record of the model.
        pairs: the questions and contexts, not empty.
        top_k: the number of answers; a short context has fewer.
        allow_no_answer: True to allow "no answer" as an answer.
        max_tokens: the maximum number of tokens in an answer; None means the longest training answer, or 15 if unknown.
        doc_stride: the number of tokens that neighbouring windows share. None means 128, or half of a shorter window.
        align_to_words: True to extend answers to whole words and to add the scores of equal texts, ignoring case.
        batch_size: the maximum number of windows in a batch; None means that only a token budget limits it.

    Raises:
        InputError: the model does not answer questions, or a text or a number is out of range.
        RunFailure: the model's outputs are not finite.

    Source: arXiv 1810.04805, section 4.2 and 4.3.
    """
    collator = answer_collator(module, tokenizer, record)
    max_tokens = longest_answer(record) if max_tokens is None else max_tokens
    for name, count in (("top_k", top_k), ("max_tokens", max_tokens)):
        if count < 1:
            raise InputError(argument(name) + f" must be at least 1, got {count}")
    if allow_no_answer:
        check_no_answer(collator)
    sizes = {"longest": window_length(module, record), "num_special": collator.special_tokens.num_added(paired=True)}
    windows_of = partial(context_windows, **sizes, overlap=doc_stride)
    results = list[list[Answer]]()
    size = _PAIRS if computes_late(device_of(module)) and not is_watching() else 1
    for start in range(0, len(pairs), size):
        group = [_encode(tokenizer, *pair, windows_of) for pair in pairs[start : start + size]]
        scores = _score_group(module, collator, group, before=start, batch_size=batch_size)
        for pair in group:
            words = tokenizer.split_words(pair.context[:MOST_CHARACTERS]) if align_to_words else None
            candidates = _Candidates(pair.context, pair.spans, words)
            scored = zip(pair.windows, scores, strict=False)
            results.append(_best_answers(candidates, scored, top_k, max_tokens, allow_no_answer))
    return results


def _score_group(
    module: Transformer, collator: InputCollator, group: Sequence[_EncodedPair], *, before: int, batch_size: int | None
) -> Iterator[WindowScores]:
    """Return the scores of all windows of several pairs in their order; `before` pairs come before them."""
    owners = [number for number, pair in enumerate(group) for _ in pair.windows]
    texts = [pair.ids[window.start : window.stop] for pair in group for window in pair.windows]
    questions = [group[number].question for number in owners]
    with naming_texts([before + number for number in owners], are_rows=False):
        return iter(sorted(window_scores(module, collator, questions, texts, batch_size=batch_size)))


def _best_answers(
    candidates: _Candidates,
    scored: Iterable[tuple[range, WindowScores]],
    top_k: int,
    max_tokens: int,
    allow_no_answer: bool,
) -> list[Answer]:
    """Add the best spans of each window to the candidates, and return the best answers.

    Args:
        candidates: the candidates of the context.
        scored: the windows and their scores, in the order of the context: the first of equal texts gives the span.
        top_k, max_tokens, allow_no_answer: the arguments of `answer_pairs`.
    """
    # Whole words merge candidates, so that more of them are needed.
    num_candidates = top_k if candidates.words is None else 2 * top_k + 10
    no_answer = 1.0
    for window, (_, starts, ends) in scored:
        starts, ends = starts.exp(), ends.exp()
        no_answer = min(no_answer, float(starts[0] * ends[0]))
        for first, last, score in best_spans(starts[1:], ends[1:], num_candidates, max_tokens):
            candidates.add(window, first, last, score)
    answers = [*candidates.answers.values()]
    if allow_no_answer:
        answers.append(Answer("", no_answer, 0, 0))
    return sorted(answers, key=lambda answer: (-answer.score, answer.start, answer.end))[:top_k]


@dataclass(frozen=True)
class _Candidates:
    """Candidates for answers in a context.

    Args:
        context: the context.
        spans: the span of each token of the context, in characters.
        words: the number of the word of each token, to extend answers to whole words. None means no extension.
        answers: the answers, by their span; with words, by their text in lower case.
    """

    context: str
    spans: Sequence[Span]
    words: Sequence[int | None] | None
    answers: dict[Span | str, Answer] = field(default_factory=dict)

    def add(self, window: range, first: int, last: int, score: float) -> None:
        """Add a span from the token `first` to the token `last` of a window.

        Equal spans get the highest of their scores. With words, equal texts get the sum of their scores.
        """
        first, last = window[first], window[last]
        if self.words is not None:
            first, last = self._word_end(first, window.start, -1), self._word_end(last, window.stop - 1, 1)
        start, end = self.spans[first][0], self.spans[last][1]
        text = self.context[start:end]
        if self.words is None:
            known = self.answers.get((start, end))
            if known is None or score > known.score:
                self.answers[start, end] = Answer(text, score, start, end)
            return
        known = self.answers.get(text.lower())
        merged = Answer(text, score, start, end) if known is None else replace(known, score=known.score + score)
        self.answers[text.lower()] = merged

    def _word_end(self, token: int, limit: int, step: int) -> int:
        """Return the outermost token of the word of a token, in a direction and up to the edge of the window."""
        assert self.words is not None
        word = self.words[token]
        while word is not None and token != limit and self.words[token + step] == word:
            token += step
        return token


@dataclass(frozen=True)
class _EncodedPair:
    """Ids of a question, and a context with its ids, the character span of each id, and its windows in ids."""

    question: list[int]
    context: str
    ids: list[int]
    spans: list[Span]
    windows: Sequence[range]


def _encode(
    tokenizer: Tokenizer, question: str, context: str, windows_of: Callable[[int, int], Sequence[range]]
) -> _EncodedPair:
    """Return the ids of a question and of its context.

    Args:
        tokenizer: the tokenizer of the model.
        question, context: the texts.
        windows_of: a function of the numbers of ids of both that returns the windows of the context.

    Raises:
        InputError: the question or the context has no token.
    """
    warn_of_long_texts(len(context) > MOST_CHARACTERS, MOST_CHARACTERS, "characters")
    question_ids = tokenizer.encode(question[:MOST_CHARACTERS])
    ids, spans = tokenizer.encode_with_spans(context[:MOST_CHARACTERS])
    for name, tokens in (("question", question_ids), ("context", ids)):
        if not tokens:
            raise InputError(f"the {name} is empty; there is nothing to {'ask' if name == 'question' else 'read'}")
    return _EncodedPair(question_ids, context, ids, spans, windows_of(len(question_ids), len(ids)))


def answer_collator(module: Transformer, tokenizer: Tokenizer, record: TaskRecord) -> InputCollator:
    """Return the collator of questions and contexts for a model.

    Raises:
        InputError: the model does not answer questions, or its tokenizer has no template for pairs.
    """
    head = module.head
    if record.kind != "answer" or head is None or head.is_pooled or module.spec.num_outputs != 2:
        raise InputError(
            f"this model was trained to '{record.kind}', so it cannot answer questions: train it with [task] "
            'kind = "answer" and init = "…", the path of this model, or load a checkpoint whose class ends in '
            "ForQuestionAnswering"
        )
    collator = InputCollator.of(module.spec, tokenizer, record.repeats)
    collator.special_tokens.template(paired=True)
    return collator


def check_no_answer(collator: InputCollator) -> None:
    """Raise an error if the tokenizer has no token that can represent "no answer".

    Raises:
        InputError: the tokenizer puts no special token in front of a pair.
    """
    if not collator.has_pair_front:
        raise InputError(
            "this tokenizer puts no special token before a text, which 'no answer' needs; use a tokenizer with a start "
            "token"
        )


def window_length(module: Transformer, record: TaskRecord) -> int:
    """Return the maximum number of tokens that a model reads at once: its training length, or 384 if unknown."""
    return max_input_length(module, record.max_length or WINDOW)


def longest_answer(record: TaskRecord) -> int:
    """Return the maximum answer length in tokens: that of the training answers, or a default if unknown."""
    return record.answer_tokens or MAX_ANSWER_TOKENS


def window_scores(
    module: Transformer,
    collator: InputCollator,
    questions: Sequence[Ids],
    contexts: Sequence[Ids],
    *,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> Iterator[WindowScores]:
    """Yield, per window, the log-probabilities that the answer starts and that it ends at each token.

    Args:
        module: a model whose head scores each token as start and as end of an answer. It runs in evaluation mode, and
            its mode is restored.
        collator: the collator of the model's inputs.
        questions: the ids of the question of each window, without special tokens.
        contexts: the ids of each window, without special tokens.
        batch_size, batch_tokens: the limits of a batch, see `batch_outputs`.

    Yields:
        The number of the window, and two float64 rows, for start and end. Each row has an entry for "no answer" (the
        first special token), and then one per token of the window.

    Raises:
        RunFailure: the model's outputs are not finite.
    """
    block = TextBlock([questions, contexts], range(len(contexts)))
    sizes = {"batch_size": batch_size, "batch_tokens": batch_tokens}
    for _, rows, logits_WT2 in batch_outputs(module, collator, [block], **sizes):
        check_finite(logits_WT2)
        for row, logits_T2 in zip(rows, logits_WT2.double(), strict=True):
            no_answer_logits = logits_T2[:1] if collator.has_pair_front else logits_T2.new_full((1, 2), -torch.inf)
            offset = collator.second_start(len(questions[row]))
            inside = logits_T2[offset : offset + len(contexts[row])]
            starts, ends = torch.cat([no_answer_logits, inside]).log_softmax(0).unbind(1)
            yield row, starts, ends


def best_spans(
    starts_T: Float[Tensor, " tokens"], ends_T: Float[Tensor, " tokens"], top_k: int, max_tokens: int
) -> list[tuple[int, int, float]]:
    """Return the most probable spans of a window.

    Args:
        starts_T, ends_T: the probability that an answer starts, and that it ends, at each token.
        top_k: the number of spans; a short window has fewer.
        max_tokens: the maximum number of tokens in a span.

    Returns:
        The first token, the last token and the score of each span, best first.
    """
    count = len(starts_T)
    longest = min(max_tokens, count)
    padded = torch.cat([ends_T, ends_T.new_full((longest - 1,), -1.0)])
    # Row k holds the scores of answers with k + 1 tokens.
    scores_KT = starts_T * torch.stack([padded[extra : extra + count] for extra in range(longest)])
    is_inside_KT: Bool[Tensor, "lengths tokens"] = torch.arange(count) + torch.arange(longest)[:, None] < count
    scores = scores_KT.where(is_inside_KT, -1.0).flatten()
    best = scores.topk(min(top_k, int(is_inside_KT.sum())))
    positions = [divmod(int(index), count) for index in best.indices]
    return [(first, first + extra, float(score)) for (extra, first), score in zip(positions, best.values, strict=True)]


def predict(model: Any, texts: Sequence[Any], *, batch_size: int | None = None) -> list[Answer]:
    """Return the best answer for each pair of a question and a context; see `Model.answer`."""
    answers = answer_pairs(model.tree, model.tokenizer, model.task, texts, batch_size=batch_size)
    return [best[0] for best in answers]


def read_texts(texts: Sequence[str], collator: InputCollator, tokenizer: Tokenizer, task: TaskRecord) -> ModelInputs:
    """Return the model inputs for a question and its context; see `collate_texts`."""
    if len(texts) == 1:
        raise InputError("this model answers questions: give a pair of a question and a text with the answer")
    return collate_texts(texts, collator, tokenizer, task)


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class AnswerScores:
    """Scores of answers as the SQuAD evaluation defines them.

    Args:
        exact_match: the share of questions whose answer equals a right answer, 0 to 1.
        f1: the mean F1 over words between the answer and the most similar right answer, 0 to 1.
        num_questions: the number of questions.
    """

    exact_match: float
    f1: float
    num_questions: int

    def record(self) -> dict[str, float | int]:
        """Return the scores by name, as JSON values."""
        return {"exact_match": self.exact_match, "f1": self.f1, "questions": self.num_questions}


def answer_scores(predicted: Sequence[str], expected: Sequence[Sequence[str]]) -> AnswerScores:
    """Score answers against the right ones; for each question, the best match of its right answers counts.

    Texts are compared in lower case, without punctuation and articles. F1 counts the words that both have. An empty
    text means "no answer". It is right, with an F1 of 1, if no answer is expected, otherwise wrong.

    Args:
        predicted: the answer to each question; at least one question.
        expected: the right answers to each question; an empty list if the context holds none.

    Source: arXiv 1606.05250, section 6.1 and its evaluation program; arXiv 1806.03822, section 5 for "no answer".
    """
    exact = f1 = 0.0
    for text, golds in zip(predicted, expected, strict=True):
        guess = _answer_words(text)
        # A right answer of only articles and punctuation counts as no answer.
        right = list(filter(None, map(_answer_words, golds))) or [[]]
        exact += guess in right
        f1 += max(_word_f1(guess, words) for words in right)
    return AnswerScores(exact / len(predicted), f1 / len(predicted), len(predicted))


def _answer_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _word_f1(guess: Sequence[str], gold: Sequence[str]) -> float:
    if not guess or not gold:
        return float(guess == gold)
    return 2 * (Counter(guess) & Counter(gold)).total() / (len(guess) + len(gold))


@dataclass(frozen=True, repr=False, eq=False)
class AnswerMeasures(Measures):
    """Metrics of a model that answers questions.

    Args:
        exact_match, f1: the scores over all questions, see `AnswerScores`.
        questions: the number of questions.
        loss: the mean cross-entropy of start and end over all windows, in nats.
        has_answer, no_answer: the scores over the questions with and without an answer; None if all questions have one.
    """

    exact_match: float
    f1: float
    questions: int
    loss: float
    has_answer: AnswerScores | None
    no_answer: AnswerScores | None

    @property
    def score(self) -> float:
        """The validation score: F1 times 100."""
        return 100 * self.f1

    def record(self) -> dict[str, Any]:
        """Return the metrics by name, as JSON values."""
        kinds = {name: scores.record() for name, scores in self._kinds().items()}
        return {
            "exact_match": self.exact_match,
            "f1": self.f1,
            "questions": self.questions,
            "loss": finite_or_none(self.loss),
            **kinds,
        }

    def lines(self) -> list[str]:
        """Return the metrics as lines of text: over all questions, and over those with and without an answer."""
        rows = {"all": AnswerScores(self.exact_match, self.f1, self.questions)}
        rows |= {name.replace("_", " "): scores for name, scores in self._kinds().items()}
        width = max(len("questions"), *map(len, rows))
        return [f"{'questions':<{width}}  exact match      F1   count"] + [
            f"{name:<{width}}  {100 * row.exact_match:>11.2f}  {100 * row.f1:>6.2f}  {row.num_questions:>6}"
            for name, row in rows.items()
        ]

    def _kinds(self) -> dict[str, AnswerScores]:
        kinds = {"has_answer": self.has_answer, "no_answer": self.no_answer}
        return {name: scores for name, scores in kinds.items() if scores is not None}


def measure(model: EvaluatedModel, data: object, options: EvaluateOptions) -> AnswerMeasures:
    """Measure the answers of a model, as the SQuAD evaluation does.

    Raises:
        InputError: the model does not answer questions, or the data cannot be used.
        RunFailure: the model's outputs are not finite.
    """
    module, tokenizer, task = model.tree, model.tokenizers.source, model.task
    source = DATA.source(data)
    collator = answer_collator(module, tokenizer, task)
    store = prepare_answers(source, tokenizer, max_length=window_length(module, task))
    most = longest_answer(task)
    measures = measure_store(module, collator, store, max_tokens=most, batch_size=options.batch_size)
    message(store.report)
    return measures


def measure_store(
    module: Transformer,
    collator: InputCollator,
    store: Store,
    *,
    max_tokens: int,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> AnswerMeasures:
    """Answer prepared questions and measure the answers; "no answer" is allowed if some question has none.

    Args:
        module: a model whose head scores each token as start and as end of an answer. If it is in training mode, a
            replica in evaluation mode runs in its place.
        collator: the collator of the model's inputs.
        store: the store of the questions and the windows of their contexts.
        max_tokens: the maximum number of tokens in an answer.
        batch_size, batch_tokens: the limits of a batch, see `window_scores`.

    Raises:
        InputError: a question has no answer, but the tokenizer has no token for "no answer".
        RunFailure: the model's outputs are not finite.
    """
    golds = gold_texts(store)
    has_unanswerable = not all(golds)
    if has_unanswerable:
        check_no_answer(collator)
    questions, contexts = zip(*map(partial(window_ids, store), range(len(store))), strict=True)
    best: defaultdict[int, _BestSpan] = defaultdict(_BestSpan)
    total = 0.0
    sizes = {"batch_size": batch_size, "batch_tokens": batch_tokens}
    for row, starts, ends in window_scores(module, collator, questions, contexts, **sizes):
        first, last = (0 if token == NO_ANSWER else token + 1 for token in store.arrays["labels"][row].tolist())
        total -= float(starts[first] + ends[last]) / 2
        front = int(store.arrays["borders"][row, 0])
        best[int(store.arrays["rows"][row])].add(starts.exp(), ends.exp(), front, max_tokens)
    predicted, spans = [""] * len(golds), store.arrays["spans"]
    for question, span in best.items():
        if not (has_unanswerable and span.no_answer_score >= span.score):
            predicted[question] = context_text(store, question)[spans[span.first, 0] : spans[span.last, 1]]
    return _measures(total / len(store), predicted, golds)


@dataclass
class _BestSpan:
    """The best span over all windows of a question, and the lowest score of "no answer"."""

    score: float = -math.inf
    first: int = 0
    last: int = 0
    no_answer_score: float = 1.0

    def add(
        self, starts_T: Float[Tensor, " tokens"], ends_T: Float[Tensor, " tokens"], front: int, max_tokens: int
    ) -> None:
        """Update the best span with a window whose first id is number `front` among the ids of all contexts."""
        ((first, last, score),) = best_spans(starts_T[1:], ends_T[1:], 1, max_tokens)
        # Windows arrive in any order: among equal scores the first span in the context wins, as in `answer`.
        if (score, -front - first, -front - last) > (self.score, -self.first, -self.last):
            self.score, self.first, self.last = score, front + first, front + last
        self.no_answer_score = min(self.no_answer_score, float(starts_T[0] * ends_T[0]))


def _measures(loss: float, predicted: list[str], golds: list[list[str]]) -> AnswerMeasures:
    """Return the metrics of predicted answers; if some questions have no answer, also for both kinds of question."""
    kinds: dict[bool, AnswerScores] = {}
    for has_answer in {bool(gold) for gold in golds}:
        rows = [row for row, gold in enumerate(golds) if bool(gold) == has_answer]
        kinds[has_answer] = answer_scores([predicted[row] for row in rows], [golds[row] for row in rows])
    with_answer, without = (None, None) if False not in kinds else (kinds.get(True), kinds[False])
    every = answer_scores(predicted, golds)
    return AnswerMeasures(every.exact_match, every.f1, every.num_questions, loss, with_answer, without)
