"""The data of token classification: words with tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field

from clearhead.data.sources.examples import ListedExamples
from clearhead.data.sources.run_file_tables import Filled, Form, has_ending, parse_table, user_path
from clearhead.data.sources.tables import JsonLinesFile
from clearhead.data.sources.tagged import TaggedFile, TaggedRows, TaggedSource, read_tagged
from clearhead.tasks.data import LabelledExamples, TaskData, TaskSection

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


def _labelled(options: Mapping[str, Any], train: LabelledExamples | None) -> LabelledExamples:
    """As of `TaskData.labelled`."""
    # They load NumPy, for which a fault in a run file should not wait.
    from clearhead.data.stores.tag_set import find_scheme, learn_tags

    table = {"text": str(options["text"])}
    data = read_tagged(parse_tagged_source(table))
    scheme = find_scheme(data)
    return LabelledExamples(
        table=table,
        what="sentences",
        texts=[(" ".join(words),) for words in data.words],
        keys=[[tuple(words)] for words in data.words],
        record=lambda row: {"tokens": list(data.words[row]), "tags": list(data.tags[row])},
        facts=f"; {len(learn_tags(data, scheme).names)} tags, scheme {scheme}",
        few="tagged sentences (an empty line ends one)",
    )


DATA: Final = TaskData(TaskSection, (TaggedText,), ListedExamples((_FIELDS,), (*_FIELDS,)), labelled=_labelled)


def parse_tagged_source(table: Mapping[str, Any]) -> TaggedSource:
    """Turn a table of a run file, such as { text = "t.conll" }, into a source.

    Args:
        table: the key "text".

    Raises:
        InputError: every unknown or missing key and every wrong type, in one report.
    """
    return parse_table(table, (TaggedText,)).as_source()
