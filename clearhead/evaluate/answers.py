"""How well a model finds the answers to questions in their contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clearhead.core import Transformer
from clearhead.data.batches.inputs import InputCollator
from clearhead.data.sources.answers import AnswerSource
from clearhead.data.stores.answers import NO_ANSWER, AnswerStore, prepare_answers
from clearhead.evaluate.metrics import AnswerScores, answer_scores
from clearhead.predict.answer import (
    answer_collator,
    best_spans,
    check_no_answer,
    longest_answer,
    window_length,
    window_scores,
)
from clearhead.task import TaskRecord
from clearhead.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswerEvaluation:
    """What a model reaches on questions with known answers.

    Args:
        loss: mean over windows of the mean of two cross-entropies, of the start and of the end, in nats.
        scores: of all questions.
        has_answer, no_answer: of the questions with and without an answer; None if every question has one.
        report: which questions of the source were used, as a sentence.
    """

    loss: float
    scores: AnswerScores
    has_answer: AnswerScores | None
    no_answer: AnswerScores | None
    report: str


def evaluate_answers(
    module: Transformer,
    tokenizer: Tokenizer,
    record: TaskRecord,
    source: AnswerSource,
    *,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> AnswerEvaluation:
    """Answer the questions of a source and score the answers.

    Args:
        module: used in evaluation mode, its own mode is restored.
        tokenizer: the tokenizer it was trained with.
        record: the task it was trained for.
        source: questions with their contexts.
        batch_size: most windows of one batch; None: no limit but the tokens.
        batch_tokens: most padded tokens of one batch, None: `read_tokens`; a longer window is a batch of its own.

    Raises:
        InputError: the model does not answer questions, or the source is unusable.
        RunFailure: the model's outputs are not finite.
    """
    collator = answer_collator(module, tokenizer, record)
    store = prepare_answers(source, tokenizer, max_length=window_length(module, record))
    most = longest_answer(record)
    return evaluate_answer_store(
        module, collator, store, max_tokens=most, batch_size=batch_size, batch_tokens=batch_tokens
    )


def evaluate_answer_store(
    module: Transformer,
    collator: InputCollator,
    store: AnswerStore,
    *,
    max_tokens: int,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
) -> AnswerEvaluation:
    """Answer prepared questions and score the answers; "no answer" is possible where a question has none.

    Args:
        module: its head scores each token as start and as end of an answer; used in evaluation mode, its own mode is
            restored.
        collator: how the model reads pairs.
        store: the questions and the windows of their contexts.
        max_tokens: most tokens of an answer.
        batch_size, batch_tokens: as for `evaluate_answers`.

    Raises:
        InputError: a question has no answer, and the tokenizer no token that could say so.
        RunFailure: the model's outputs are not finite.
    """
    golds = [store.golds(question) for question in range(len(store.questions))]
    has_unanswerable = not all(golds)
    if has_unanswerable:
        check_no_answer(collator)
    ids = [store.ids(row) for row in range(len(store))]
    best: dict[int, tuple[float, int, int]] = {}
    nowhere: dict[int, float] = {}
    total = 0.0
    texts = [one for one, _ in ids], [other for _, other in ids]
    for row, starts, ends in window_scores(module, collator, *texts, batch_size=batch_size, batch_tokens=batch_tokens):
        first, last = (0 if token == NO_ANSWER else token + 1 for token in store.labels[row].tolist())
        total -= float(starts[first] + ends[last]) / 2
        question, front = int(store.rows[row]), int(store.borders[row, 0])
        starts, ends = starts.exp(), ends.exp()
        ((first, last, score),) = best_spans(starts[1:], ends[1:], 1, max_tokens)
        # The windows come in no order: of equal scores the first in the context counts, as in `answer`.
        best[question] = max(best.get(question, (-math.inf, 0, 0)), (score, -front - first, front + last))
        nowhere[question] = min(nowhere.get(question, 1.0), float(starts[0] * ends[0]))
    predicted = [""] * len(golds)
    for question, (score, negative, last) in best.items():
        if not (has_unanswerable and nowhere[question] >= score):
            predicted[question] = store.context(question)[store.spans[-negative, 0] : store.spans[last, 1]]
    return _evaluation(total / len(store), predicted, golds, str(store.report))


def _evaluation(loss: float, predicted: list[str], golds: list[list[str]], report: str) -> AnswerEvaluation:
    """Return the scores of all questions, and of both kinds where there are questions without an answer."""
    parts: dict[bool, AnswerScores] = {}
    for has_answer in {bool(gold) for gold in golds}:
        rows = [row for row, gold in enumerate(golds) if bool(gold) == has_answer]
        parts[has_answer] = answer_scores([predicted[row] for row in rows], [golds[row] for row in rows])
    with_answer, without = (None, None) if False not in parts else (parts.get(True), parts[False])
    return AnswerEvaluation(loss, answer_scores(predicted, golds), with_answer, without, report)
