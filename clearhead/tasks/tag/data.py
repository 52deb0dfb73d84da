"""The data of token classification: words with tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from clearhead.data.sources.run_file_tables import Filled, Form, has_ending, parse_table, user_path
from clearhead.data.sources.tables import JsonLinesFile
from clearhead.data.sources.tagged import TaggedFile, TaggedRows, TaggedSource
from clearhead.tasks.data import DataSection, TaskData, TaskSection

_FIELDS: Final = {"tokens": "tokens", "tags": "tags"}


class TaggedText(Form):
    """A file of columns, or JSON lines."""

    marker: ClassVar[str] = "text"
    example: ClassVar[str] = '{ text = "train.conll" }'
    text: Filled

    def as_source(self) -> TaggedSource:
        """Return the source of the sentences."""
        path = user_path(self.text)
        if has_ending(path, ".jsonl"):
            return TaggedRows(JsonLinesFile(path, _FIELDS, raw=(*_FIELDS,)))
        return TaggedFile(path)


class TagData(DataSection):
    """The [data] table."""

    forms: ClassVar[tuple[type[Form], ...]] = (TaggedText,)


DATA: Final = TaskData(TaskSection, TagData, (_FIELDS,), (*_FIELDS,))


def parse_tagged_source(table: Mapping[str, Any]) -> TaggedSource:
    """Turn a table of a run file, such as { text = "t.conll" }, into a source.

    Args:
        table: the key "text".

    Raises:
        InputError: every unknown or missing key and every wrong type, in one report.
    """
    return parse_table(table, (TaggedText,)).as_source()
