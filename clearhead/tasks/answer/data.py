"""Data of extractive question answering: questions with contexts, and the answers in these contexts.

Supported formats are the SQuAD layout, JSON lines, and Python lists.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from pydantic import Field

from clearhead.base.errors import InputError, json_text, within
from clearhead.base.files import explain_absent, parse_json
from clearhead.data.sources.examples import CheckedRows, ListedExamples
from clearhead.data.sources.lines import content_key, stream_text
from clearhead.data.sources.run_file_tables import Filled, Form, has_ending, user_path
from clearhead.data.sources.tables import (
    WHOLE,
    DataTable,
    JsonLinesFile,
    Row,
    Share,
    TableSource,
    check_text,
    field_value,
    read_table,
)
from clearhead.data.task_tables import LabelledExamples, TaskData, TaskSection
from clearhead.text.long_texts import refuse_enormous

_FIELDS: Final = {"context": "context", "question": "question", "answer": "answer", "start": "start"}
_RAW: Final = ("answer", "start")
_LAYOUT: Final = ("data", "paragraphs", "qas")
_COLUMNS: Final = ("context", "question", "answers")


class GoldAnswer(NamedTuple):
    """A right answer: its text, and the index of its first character in the context, counted from 0."""

    text: str
    start: int


@dataclass(frozen=True)
class SquadFile:
    """Data file in the SQuAD layout, version 1.1 or 2.0.

    Args:
        path: the path of a JSON file, plain or .gz: {"data": [{"paragraphs": [{"context", "qas"}]}]}. Each item of
            `qas` has a "question" and "answers", a list of {"text", "answer_start"}. The list is empty if, and only
            if, "is_impossible" is true.

    Source: arXiv 1606.05250 (1.1) and arXiv 1806.03822 (2.0).
    """

    path: Path
    columns = _COLUMNS

    def rows(self) -> Iterator[Row]:
        """Yield the questions in file order, with the numbers of article, paragraph and question."""
        document, is_empty = self._document(), True
        for article, content in self._items(document, ()):
            for paragraph, values in self._items(content, article):
                context = _read_nonempty_text(values, "context", self.location(paragraph))
                for number, entry in self._items(values, paragraph):
                    is_empty, location = False, self.location(number)
                    yield (
                        number,
                        (
                            context,
                            _read_nonempty_text(entry, "question", location),
                            _squad_answers(entry, context, location),
                        ),
                    )
        if is_empty:
            raise InputError(f"{self.path}: expected at least one question, got none")

    def _document(self) -> object:
        try:
            return parse_json("".join(stream_text(self.path)))
        except json.JSONDecodeError as error:
            raise InputError(
                f"{self.path}:{error.lineno}: expected JSON in the SQuAD layout, but {error.msg.lower()}; if this "
                "file holds JSON lines, rename it to end in .jsonl"
            ) from None

    def _items(self, record: object, number: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], object]]:
        """Yield the articles, paragraphs or questions in the list of a JSON object, each with its number."""
        for index, value in enumerate(_list_of(record, _LAYOUT[len(number)], self.location(number))):
            yield (*number, index), value

    def location(self, number: tuple[int, ...]) -> str:
        """Return the location of a question, a paragraph or an article for messages, such as "f.json: data[0]"."""
        levels = [f"{name}[{index}]" for name, index in zip(_LAYOUT, number, strict=False)]
        return ": ".join(filter(None, [str(self.path), ".".join(levels)]))

    def identity(self) -> list[object]:
        """Return JSON values that identify the content of the file, for the key of the cache."""
        return ["answers", "squad", content_key(self.path)]


class QuestionRows(CheckedRows):
    """Source of questions that are read from the rows of a table and checked.

    The table has the columns "context", "question", "answer" and "start". The last two hold lists if several answers
    are right, and null if the context holds none.
    """

    kind: ClassVar[str] = "answers"
    columns: ClassVar[tuple[str, ...]] = _COLUMNS

    def check(self, record: Mapping[str, Any], location: str) -> tuple[Any, ...]:
        """Return context, question and answers of a row, or raise an error if a value is unusable."""
        context, question = (
            _read_nonempty_text(record, "context", location),
            _read_nonempty_text(record, "question", location),
        )
        texts, starts = _as_list(record["answer"]), _as_list(record["start"])
        if len(texts) != len(starts):
            raise InputError(f"{location}: expected a start for each of the {len(texts)} answers, got {len(starts)}")
        golds = [_check_gold_answer(text, start, context, location) for text, start in zip(texts, starts, strict=True)]
        return context, question, tuple(golds)


def _list_of(record: object, field: str, location: str) -> list[object]:
    values = field_value(record, field, location)
    if not isinstance(values, list):
        raise InputError(f"{location}: field '{field}' is {json_text(values)}; expected a list, as in the SQuAD layout")
    return values


def _read_nonempty_text(record: object, field: str, location: str) -> str:
    text = check_text(field_value(record, field, location), field, location)
    if not text.strip():
        raise InputError(f"{location}: the {field} is empty; expected a text")
    with within(location):
        refuse_enormous([text], None, field)
    return text


def _squad_answers(entry: object, context: str, location: str) -> tuple[GoldAnswer, ...]:
    golds = []
    for index, answer in enumerate(_list_of(entry, "answers", location)):
        its_location = f"{location}.answers[{index}]"
        text, start = (field_value(answer, field, its_location) for field in ("text", "answer_start"))
        golds.append(_check_gold_answer(text, start, context, its_location))
    is_impossible = bool(entry.get("is_impossible")) if isinstance(entry, Mapping) else False
    if is_impossible and golds:
        raise InputError(
            f"{location}: the question is marked as impossible, but it has answers; remove the mark or the answers"
        )
    if not golds and not is_impossible:
        raise InputError(
            f'{location}: the question has no answer; if the context holds none, mark it with "is_impossible": true'
        )
    return tuple(golds)


def _as_list(value: object) -> list[object]:
    """Return the value of a field as a list: a list unchanged, null as an empty list, anything else as one item."""
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


def _check_gold_answer(text: object, start: object, context: str, location: str) -> GoldAnswer:
    """Return an answer after checking that its context contains it at `start`.

    Raises:
        InputError: the context has another text at `start`; the message quotes it.
    """
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{location}: the answer is {json_text(text)}; expected a text from the context")
    if not isinstance(start, int) or isinstance(start, bool):
        raise InputError(
            f"{location}: the start of the answer is {json_text(start)}; expected a character index, from 0"
        )
    if start < 0 or context[start : start + len(text)] != text:
        first = context.find(text)
        there = (
            f"found {json_text(context[start : start + len(text)])}" if 0 <= start < len(context) else "found no text"
        )
        mend = f"it begins at character {first}" if first >= 0 else "the context does not contain it"
        raise InputError(
            f"{location}: the answer {json_text(text)} does not begin at character {start} of the context: "
            f"{there}; {mend}"
        )
    return GoldAnswer(text, start)


class AnswerText(Form):
    """The [data] keys for a file in the SQuAD layout, or a file of JSON lines."""

    #: A .json file in the SQuAD layout, or .jsonl with context, question, answer and start.
    text: Filled = Field(examples=["train.json"])

    def as_source(self) -> TableSource:
        """Return the source that reads the questions of the file."""
        path = user_path(self.text)
        if path.is_dir():
            raise InputError(f"{path} is a folder: name a file in it")
        if has_ending(path, ".jsonl"):
            return QuestionRows(JsonLinesFile(path, _FIELDS, raw=_RAW))
        if has_ending(path, ".json"):
            return SquadFile(path)
        # A file with a valid ending may be written later, before it is read, such as a list of examples.
        if not path.exists():
            raise InputError(f"{path}: {explain_absent(path)}")
        raise InputError(
            f"{path}: expected a name that ends in .json, for the SQuAD layout, or in .jsonl, for lines with "
            f"{', '.join(_FIELDS)}"
        )


def read_answers(source: TableSource, share: Share = WHOLE) -> DataTable:
    """Read questions into a table with the columns "context", "question" and "answers" (tuples of `GoldAnswer`).

    Args:
        source: the source of the questions.
        share: the share of the rows to read, see `read_table`.

    Raises:
        InputError: the file is missing or unusable, an answer is not in its context, or the share has no question.
    """
    return read_table(source, share, what="question", row_keys=_group_keys)


def _group_keys(data: DataTable) -> tuple[list[list[str]], list[bool]]:
    """Return the context of each question, and True for each with an answer; a split keeps equal contexts together."""
    return [[context] for context in data["context"]], list(map(bool, data["answers"]))


def answer_texts(source: TableSource, share: Share = WHOLE) -> list[str]:
    """Return the distinct contexts and all questions of a source, to train a tokenizer."""
    data = read_answers(source, share)
    return [*dict.fromkeys(data["context"]), *data["question"]]


# In a Python list the question comes before its context.
_EXAMPLES: Final = ListedExamples(
    ({"question": "question", "context": "context", "answer": "answer", "start": "start"},), _RAW, QuestionRows
)


def _read_labelled_examples(options: Mapping[str, Any], train: LabelledExamples | None) -> LabelledExamples:
    """Read the training examples for `clearhead new`; questions about one context stay together in a split."""
    form = AnswerText(text=str(options["text"]))
    data = read_answers(form.as_source())
    contexts = dict.fromkeys(data["context"])
    without = sum(not answers for answers in data["answers"])
    keys, groups = _group_keys(data)

    def record(row: int) -> dict[str, object]:
        texts, starts = ([gold[side] for gold in data["answers"][row]] for side in (0, 1))
        return {"context": data["context"][row], "question": data["question"][row], "answer": texts, "start": starts}

    return LabelledExamples(
        table=form.model_dump(),
        what="questions",
        texts=[(text,) for text in (*contexts, *data["question"])],
        keys=keys,
        groups=groups,
        record=record,
        facts=f"; {len(contexts)} contexts, {without} questions without an answer",
    )


DATA: Final = TaskData(
    TaskSection,
    (AnswerText,),
    _EXAMPLES,
    labelled=_read_labelled_examples,
    read=lambda source, share, task: read_answers(source, share),
)
