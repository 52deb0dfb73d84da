"""The data of token classification: words with tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field

from clearhead.data.sources.examples import ListedExamples
from clearhead.data.sources.run_file_tables import Filled, Form, has_ending, parse_table, user_path
from clearhead.data.sources.tables import JsonLinesFile
from clearhead.data.sources.tagged import TaggedFile, TaggedRows, TaggedSource
from clearhead.tasks.data import TaskData, TaskSection

_FIELDS: Final = {"tokens": "tokens", "tags": "tags"}


class TaggedText(Form):
    """A file of columns, or JSON lines."""

    text: Filled = Field(examples=["train.conll"])

    def as_source(self) -> TaggedSource:
        """Return the source of the sentences."""
        path = user_path(self.text)
        if has_ending(path, ".jsonl"):
            return TaggedRows(JsonLinesFile(path, _FIELDS, raw=(*_FIELDS,)))
        return TaggedFile(path)


DATA: Final = TaskData(TaskSection, (TaggedText,), ListedExamples((_FIELDS,), (*_FIELDS,)))


def parse_tagged_source(table: Mapping[str, Any]) -> TaggedSource:
    """Turn a table of a run file, such as { text = "t.conll" }, into a source.

    Args:
        table: the key "text".

    Raises:
        InputError: every unknown or missing key and every wrong type, in one report.
    """
    return parse_table(table, (TaggedText,)).as_source()
