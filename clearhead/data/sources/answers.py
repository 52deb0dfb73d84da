"""Questions about contexts with the answers that stand in them: the SQuAD layout, JSON lines or a list."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from clearhead.data.sources.lines import content_key, stream_text
from clearhead.data.sources.tables import (
    WHOLE,
    Examples,
    JsonLinesFile,
    Share,
    checked_text,
    field_value,
)
from clearhead.errors import InputError, json_text, within
from clearhead.files import parse_json
from clearhead.text.long_texts import refuse_enormous

_FIELDS = ("context", "question", "answer", "start")
_RAW = ("answer", "start")


class GoldAnswer(NamedTuple):
    """A right answer: its characters, and the place of the first of them in the context, counted from 0."""

    text: str
    start: int


class Question(NamedTuple):
    """A question about a context; it has no answer there where `answers` is empty, and `place` is for messages."""

    context: str
    question: str
    answers: tuple[GoldAnswer, ...]
    place: str


@dataclass(frozen=True)
class SquadFile:
    """A file in the SQuAD layout, version 1.1 or 2.0.

    Args:
        path: a JSON file, plain or .gz: {"data": [{"paragraphs": [{"context", "qas"}]}]}. Each of `qas` has a
            "question" and "answers", a list of {"text", "answer_start"}; the list is empty where "is_impossible" is
            true, and only there.

    Source: arXiv 1606.05250 (1.1) and arXiv 1806.03822 (2.0).
    """

    path: Path

    def questions(self) -> Iterator[Question]:
        """Go through the questions in file order."""
        for article, where in _items(self._document(), "data", str(self.path), f"{self.path}: data"):
            for paragraph, place in _items(article, "paragraphs", where, f"{where}.paragraphs"):
                context = _filled(paragraph, "context", place)
                for entry, at in _items(paragraph, "qas", place, f"{place}.qas"):
                    yield Question(context, _filled(entry, "question", at), _squad_answers(entry, context, at), at)

    def _document(self) -> object:
        try:
            return parse_json("".join(stream_text(self.path)))
        except json.JSONDecodeError as error:
            raise InputError(
                f"{self.path}:{error.lineno}: expected JSON in the SQuAD layout, but {error.msg.lower()}; the name of "
                "a file of JSON lines ends in .jsonl"
            ) from None

    @property
    def name(self) -> str:
        """The source, for messages."""
        return str(self.path)

    def identity(self) -> list[object]:
        """Return JSON values that the questions depend on."""
        return ["answers", "squad", content_key(self.path)]


@dataclass(frozen=True)
class AnswerRows:
    """Questions as rows of a table: JSON lines or a list.

    Args:
        table: its columns are "context", "question", "answer" and "start"; the last two are lists where there are
            several right answers, and null where the context holds none.
    """

    table: JsonLinesFile | Examples

    def questions(self) -> Iterator[Question]:
        """Go through the questions in order."""
        for number, values in self.table.rows():
            place, record = self.table.place(number), dict(zip(self.table.columns, values, strict=True))
            context, question = (_filled(record, field, place) for field in ("context", "question"))
            texts, starts = (_listed(record[field]) for field in _RAW)
            if len(texts) != len(starts):
                raise InputError(f"{place}: expected a start for each of {len(texts)} answers, got {len(starts)}")
            golds = [_gold(text, begin, context, place) for text, begin in zip(texts, starts, strict=True)]
            yield Question(context, question, tuple(golds), place)

    @property
    def name(self) -> str:
        """The source, for messages."""
        return self.table.name if isinstance(self.table, Examples) else str(self.table.path)

    def identity(self) -> list[object]:
        """Return JSON values that the questions depend on."""
        return ["answers", *self.table.identity()]


AnswerSource = SquadFile | AnswerRows


def _items(record: object, field: str, place: str, name: str) -> Iterator[tuple[object, str]]:
    """Go through a list of a record; each item comes with its place."""
    values = field_value(record, field, place)
    if not isinstance(values, list):
        raise InputError(f"{place}: field '{field}' is {json_text(values)}; expected a list, as in the SQuAD layout")
    for index, value in enumerate(values):
        yield value, f"{name}[{index}]"


def _filled(record: object, field: str, place: str) -> str:
    text = checked_text(field_value(record, field, place), field, place)
    if not text.strip():
        raise InputError(f"{place}: the {field} is empty")
    with within(place):
        refuse_enormous([text], None, field)
    return text


def _squad_answers(entry: object, context: str, place: str) -> tuple[GoldAnswer, ...]:
    golds = tuple(
        _gold(field_value(answer, "text", at), field_value(answer, "answer_start", at), context, at)
        for answer, at in _items(entry, "answers", place, f"{place}.answers")
    )
    is_impossible = bool(entry.get("is_impossible")) if isinstance(entry, Mapping) else False
    if is_impossible and golds:
        raise InputError(f"{place}: the question is marked as impossible, but it has answers; remove one of the two")
    if not golds and not is_impossible:
        raise InputError(
            f'{place}: the question has no answer; where the context holds none, SQuAD 2.0 says "is_impossible": true'
        )
    return golds


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _gold(text: object, start: object, context: str, place: str) -> GoldAnswer:
    """Return an answer that stands in its context.

    Raises:
        InputError: it does not; the sentence says what stands there.
    """
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{place}: the answer is {json_text(text)}; expected a text that stands in the context")
    if not isinstance(start, int) or isinstance(start, bool):
        raise InputError(
            f"{place}: the start of the answer is {json_text(start)}; expected a number of characters, from 0"
        )
    if start < 0 or context[start : start + len(text)] != text:
        found = context.find(text)
        there = f"{json_text(context[start : start + len(text)])} stands" if 0 <= start < len(context) else "nothing is"
        mend = f"it stands at {found}" if found >= 0 else "it is not in the context at all"
        raise InputError(
            f"{place}: the answer {json_text(text)} does not begin at character {start} of the context, where "
            f"{there}; {mend}"
        )
    return GoldAnswer(text, start)


def read_answers(source: AnswerSource, share: Share = WHOLE) -> list[Question]:
    """Read the questions of a source.

    Args:
        source: where they are.
        share: from which to which share of them, 0 to 1.

    Raises:
        InputError: the file is missing or unusable, an answer does not stand in its context, or there is no question
            in the share.
    """
    found = list(source.questions())
    if not found:
        raise InputError(f"{source.name}: expected at least one question, found none")
    first, last = (round(border * len(found)) for border in share)
    if first == last:
        raise InputError(
            f"{source.name}: expected at least one question from {share[0]:.0%} to {share[1]:.0%} of the source, but "
            f"all of it has {len(found)}"
        )
    return found[first:last]


def answer_texts(source: AnswerSource, share: Share = WHOLE) -> list[str]:
    """Return the contexts of a source, each once, and its questions, to train a tokenizer on."""
    questions = read_answers(source, share)
    return [*dict.fromkeys(one.context for one in questions), *(one.question for one in questions)]
