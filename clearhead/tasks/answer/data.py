"""The data of extractive question answering: questions about contexts, with the answers that stand in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field

from clearhead.data.sources.answers import AnswerRows, AnswerSource, SquadFile, read_answers
from clearhead.data.sources.examples import ListedExamples
from clearhead.data.sources.run_file_tables import Filled, Form, has_ending, parse_table, user_path
from clearhead.data.sources.tables import JsonLinesFile
from clearhead.errors import InputError
from clearhead.files import absent
from clearhead.tasks.data import LabelledExamples, TaskData, TaskSection

_FIELDS: Final = {name: name for name in ("context", "question", "answer", "start")}
_RAW: Final = ("answer", "start")


class AnswerText(Form):
    """A file in the SQuAD layout, or JSON lines."""

    text: Filled = Field(examples=["train.json"])

    def as_source(self) -> AnswerSource:
        """Return the source of the questions."""
        path = user_path(self.text)
        if path.is_dir():
            raise InputError(f"{path} is a folder: name a file in it")
        if has_ending(path, ".jsonl"):
            return AnswerRows(JsonLinesFile(path, _FIELDS, raw=_RAW))
        if has_ending(path, ".json"):
            return SquadFile(path)
        # One that is well named may be written before it is read, as lists of examples are.
        if not path.exists():
            raise InputError(f"{path}: {absent(path)}")
        raise InputError(
            f"{path}: expected a name that ends in .json, for the SQuAD layout, or in .jsonl, for lines with "
            f"{', '.join(_FIELDS)}"
        )


# A list has the question first, as it is asked.
_EXAMPLES: Final = ListedExamples(({name: name for name in ("question", "context", "answer", "start")},), _RAW)


def _labelled(options: Mapping[str, Any], train: LabelledExamples | None) -> LabelledExamples:
    """As of `TaskData.labelled`; questions about one context stay together."""
    table = {"text": str(options["text"])}
    data = read_answers(parse_answer_source(table))
    contexts = dict.fromkeys(question.context for question in data)
    without = sum(not question.answers for question in data)

    def record(row: int) -> dict[str, object]:
        question = data[row]
        texts, starts = ([gold[side] for gold in question.answers] for side in (0, 1))
        return {"context": question.context, "question": question.question, "answer": texts, "start": starts}

    return LabelledExamples(
        table=table,
        what="questions",
        texts=[*((context,) for context in contexts), *((question.question,) for question in data)],
        keys=[[question.context] for question in data],
        record=record,
        facts=f"; {len(contexts)} contexts, {without} questions without an answer",
    )


DATA: Final = TaskData(TaskSection, (AnswerText,), _EXAMPLES, labelled=_labelled)


def parse_answer_source(table: Mapping[str, Any]) -> AnswerSource:
    """Turn a table of a run file, such as { text = "train.json" }, into a source.

    Args:
        table: the key "text".

    Raises:
        InputError: every unknown or missing key and every wrong type, in one report.
    """
    return parse_table(table, (AnswerText,)).as_source()
