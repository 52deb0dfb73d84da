"""The answer to a question: the stretch of a text that a model finds it in, or that the text has none.

Shape suffixes: W windows of the text, T tokens of a window, K lengths of an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.core import Transformer
from clearhead.data.batches.inputs import InputCollator
from clearhead.errors import InputError, RunFailure
from clearhead.generate.batching import batches_by_cost, device_of, evaluation_mode, read_tokens
from clearhead.predict.classify import max_length_of
from clearhead.task import TaskRecord
from clearhead.text.spans import Span
from clearhead.text.tokenizer import Tokenizer

# What such models are trained on: longer texts are read in windows, of which each shares this much with the next.
WINDOW, OVERLAP = 384, 128
LONGEST = 15
"""Most tokens of an answer where nothing else is asked."""


@dataclass(frozen=True)
class Answer:
    """A stretch of the text, or, where the text is empty, that there is no answer.

    Args:
        text: the characters it stands at.
        score: the probability that it begins where it does times that it ends where it does, among the tokens of the
            window that shows it best; where there is no answer, the least that any window gives to this.
        start, end: places in the text, in characters; `end` is behind the last one.
    """

    text: str
    score: float
    start: int
    end: int


@dataclass(frozen=True)
class _Window:
    """Some tokens of the text: the place of the first among all, and how many."""

    first: int
    count: int


def answer(
    module: Transformer,
    tokenizer: Tokenizer,
    record: TaskRecord,
    question: str,
    context: str,
    *,
    top_k: int = 1,
    allow_no_answer: bool = False,
    max_tokens: int = LONGEST,
    batch_size: int | None = None,
) -> list[Answer]:
    """Return where in a text a question is answered, the best answer first.

    A text that is longer than what the model reads at once is read in windows that overlap.

    Args:
        module: its head scores each token as the first and as the last of an answer; used in evaluation mode, its own
            mode is restored.
        tokenizer: what it was trained with.
        record: what it was trained for.
        question, context: neither empty.
        top_k: how many answers; a text of few tokens has fewer.
        allow_no_answer: "no answer" is an answer too.
        max_tokens: of an answer.
        batch_size: most windows of one batch; None: only the tokens count.

    Raises:
        InputError: the model was not trained to answer, or a text or a number is out of range.
        RunFailure: the model's outputs are not finite.

    Source: arXiv 1810.04805, section 4.2 and 4.3.
    """
    collator = _collator(module, tokenizer, record)
    for name, count in (("top_k", top_k), ("max_tokens", max_tokens)):
        if count < 1:
            raise InputError(f"{name} must be at least 1, got {count}")
    asked = tokenizer.encode(question)
    ids, spans = tokenizer.encode_with_spans(context)
    for name, tokens in (("question", asked), ("context", ids)):
        if not tokens:
            raise InputError(f"the {name} is empty; there is nothing to {'ask' if name == 'question' else 'read'}")
    windows = _windows(len(asked), len(ids), collator, max_length_of(module, record))
    has_front = not isinstance(collator.special_tokens.template(paired=True)[0][0], str)
    if allow_no_answer and not has_front:
        raise InputError("this tokenizer puts no token in front of a text, where a model could say 'no answer'")
    found: dict[Span, float] = {}
    missing = 1.0
    for window, begins, ends in _scored(module, collator, asked, ids, windows, has_front, batch_size):
        missing = min(missing, float(begins[0] * ends[0]))
        for first, last, score in _best(begins[1:], ends[1:], top_k, max_tokens):
            span = spans[window.first + first][0], spans[window.first + last][1]
            found[span] = max(score, found.get(span, 0.0))
    answers = [Answer(context[start:end], score, start, end) for (start, end), score in found.items()]
    if allow_no_answer:
        answers.append(Answer("", missing, 0, 0))
    return sorted(answers, key=lambda one: (-one.score, one.start, one.end))[:top_k]


def _collator(module: Transformer, tokenizer: Tokenizer, record: TaskRecord) -> InputCollator:
    """Return how a model reads a question with its text.

    Raises:
        InputError: it was not trained to answer, or its tokenizer reads no pairs.
    """
    head = module.head
    if record.kind != "answer" or head is None or head.is_pooled or head.projection().weight_VD.shape[0] != 2:
        raise InputError(
            f"this model was trained to '{record.kind}', so it cannot find answers in a text: load a checkpoint whose "
            "class ends in ForQuestionAnswering"
        )
    collator = InputCollator.of(module.spec, tokenizer, record.repeats)
    collator.special_tokens.template(paired=True)
    return collator


def _windows(num_asked: int, num_ids: int, collator: InputCollator, max_length: int | None) -> list[_Window]:
    """Cut a text so that each window fits beside the question.

    Raises:
        InputError: the question leaves no room.
    """
    longest = WINDOW if max_length is None else min(WINDOW, max_length)
    room = longest - num_asked - collator.special_tokens.num_added(paired=True)
    # A question that fills most of a window shortens the overlap, and one that fills nearly all of it is refused.
    overlap = min(OVERLAP, longest // 2, room // 2)
    if room < 2:
        raise InputError(
            f"the question has {num_asked} tokens, and {longest} are read together with the text; shorten it"
        )
    windows = [_Window(first, min(room, num_ids - first)) for first in range(0, num_ids, room - overlap)]
    is_last = [window.first + window.count == num_ids for window in windows]
    return windows[: is_last.index(True) + 1]


def _scored(
    module: Transformer,
    collator: InputCollator,
    asked: list[int],
    ids: list[int],
    windows: Sequence[_Window],
    has_front: bool,
    batch_size: int | None,
) -> Iterator[tuple[_Window, Float[Tensor, " tokens"], Float[Tensor, " tokens"]]]:
    """Yield each window with probabilities: that an answer begins, and ends, at "nowhere" and at each of its tokens."""
    template = collator.special_tokens.template(paired=True)
    front = sum(len(asked) if part == "A" else 1 for part, _ in template[: [p for p, _ in template].index("B")])
    lengths = [len(asked) + window.count + collator.special_tokens.num_added(paired=True) for window in windows]
    device = device_of(module)
    with evaluation_mode(module), torch.inference_mode():
        for rows in batches_by_cost(lengths, budget=read_tokens(module), most_rows=batch_size):
            texts = [ids[windows[row].first : windows[row].first + windows[row].count] for row in rows]
            batch = collator.collate([asked] * len(rows), texts).to(device)
            out = module(
                batch.ids, batch.target_ids, mask=batch.mask, target_mask=batch.target_mask, segments=batch.segments
            )
            logits_WT2 = out.logits.double().cpu()
            if not bool(torch.isfinite(logits_WT2).all()):
                raise RunFailure("the model's outputs are not finite: its weights are damaged")
            for row, logits_T2 in zip(rows, logits_WT2, strict=True):
                window = windows[row]
                nowhere = logits_T2[:1] if has_front else torch.full((1, 2), -torch.inf, dtype=torch.double)
                shares = torch.cat([nowhere, logits_T2[front : front + window.count]]).softmax(0)
                yield window, shares[:, 0], shares[:, 1]


def _best(
    begins_T: Float[Tensor, " tokens"], ends_T: Float[Tensor, " tokens"], top_k: int, max_tokens: int
) -> list[tuple[int, int, float]]:
    """Return the most probable stretches of at most so many tokens: first and last token, and the score."""
    count = len(begins_T)
    longest = min(max_tokens, count)
    padded = torch.cat([ends_T, ends_T.new_full((longest - 1,), -1.0)])
    # Row k holds the ends of answers of k + 1 tokens.
    scores_KT = begins_T * torch.stack([padded[extra : extra + count] for extra in range(longest)])
    is_inside_KT: Bool[Tensor, "lengths tokens"] = torch.arange(count) + torch.arange(longest)[:, None] < count
    scores = scores_KT.where(is_inside_KT, -1.0).flatten()
    best = scores.topk(min(top_k, int(is_inside_KT.sum())))
    places = [divmod(int(index), count) for index in best.indices]
    return [(first, first + extra, float(score)) for (extra, first), score in zip(places, best.values, strict=True)]
