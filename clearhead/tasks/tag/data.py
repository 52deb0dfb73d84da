"""Data of token classification: words with tags, in columns, JSON lines or Python lists."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import Field

from clearhead.base.errors import InputError, json_text
from clearhead.data.sources.examples import CheckedRows, ListedExamples
from clearhead.data.sources.lines import content_key, read_lines
from clearhead.data.sources.run_file_tables import Filled, Form, has_ending, user_path
from clearhead.data.sources.tables import WHOLE, DataTable, JsonLinesFile, Row, Share, TableSource, read_table
from clearhead.data.task_tables import LabelledExamples, TaskData, TaskSection
from clearhead.tasks.tag.tag_set import entity_type, find_scheme, learn_tags

_FIELDS: Final = {"tokens": "tokens", "tags": "tags"}
# Only spaces and tabs separate columns; other white space, such as U+00A0, belongs to a word.
_BLANKS: Final = re.compile(r"[ \t]+")
_DOCUMENT_MARK: Final = "-DOCSTART-"


@dataclass(frozen=True)
class TaggedFile:
    """File of tagged sentences in columns.

    Args:
        path: the path of the file, plain or .gz. Each line has a word in its first column and its tag in the last one.
            An empty line ends a sentence. Columns are separated by tabs if the first line has one, otherwise by
            spaces. Lines that begin with -DOCSTART- are skipped.
        columns: the names of the columns of the table: "tokens" and "tags".
    """

    path: Path
    columns: tuple[str, ...] = tuple(_FIELDS)

    def rows(self) -> Iterator[Row]:
        """Yield the sentences in file order: the line number of the first word, and the words and tags."""
        words: list[str] = []
        tags: list[str] = []
        for number, columns in self._lines():
            if columns:
                words.append(columns[0])
                tags.append(columns[-1].strip())
            elif words:
                yield number - len(words), (words, tags)
                words, tags = [], []

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """Yield number and columns of each line; the columns are empty between sentences and at the end of the file."""
        is_tabbed, width, number = False, 0, 0
        for number, line in enumerate(read_lines(self.path), start=1):
            if not line.strip() or line.startswith(_DOCUMENT_MARK):
                yield number, []
                continue
            is_tabbed = is_tabbed if width else "\t" in line
            columns = line.split("\t") if is_tabbed else _BLANKS.split(line.strip(" \t"))
            width = width or len(columns)
            if len(columns) < 2 or not columns[0].strip() or not columns[-1].strip():
                between = "a tab" if is_tabbed else "a blank"
                raise InputError(
                    f"{self.path}:{number}: expected a word and its tag with {between} between them, got "
                    f"{json_text(line)}"
                )
            if len(columns) != width:
                raise InputError(
                    f"{self.path}:{number}: this line has {len(columns)} columns, earlier lines have {width}; expected "
                    f"in each line a word in the first column and its tag in the last, got {json_text(line)}"
                )
            yield number, columns
        yield number + 1, []

    def location(self, number: int, word: int = 0) -> str:
        """Return the location of a word for messages; `number` is the line in which its sentence begins."""
        return f"{self.path}:{number + word}"

    def identity(self) -> list[object]:
        """Return JSON values that identify the content of the file, for the key of the cache."""
        return ["tagged", "columns", content_key(self.path)]


class TaggedRows(CheckedRows):
    """Sentences from table rows with the lists "tokens" and "tags"; sentences without words are left out."""

    kind: ClassVar[str] = "tagged"
    columns: ClassVar[tuple[str, ...]] = tuple(_FIELDS)

    def check(self, record: Mapping[str, Any], location: str) -> tuple[Any, ...]:
        """Return the words and tags of a row, or raise an error if they are unusable."""
        words, tags = (_texts(record[field], field, location) for field in _FIELDS)
        if len(words) != len(tags):
            raise InputError(f"{location}: expected a tag for each of the {len(words)} words, got {len(tags)}")
        return (words, tags) if words else ()

    def location(self, number: int, word: int | None = None) -> str:
        """Return the location of a sentence, or of one of its words, for messages."""
        return super().location(number) + ("" if word is None else f", word {word + 1}")


def _texts(value: object, field: str, location: str) -> list[str]:
    if not isinstance(value, list):
        raise InputError(f"{location}: field '{field}' is {json_text(value)}; expected a list of texts")
    for number, text in enumerate(value, start=1):
        if not isinstance(text, str) or not text.strip() or any("\ud800" <= letter <= "\udfff" for letter in text):
            raise InputError(f"{location}: item {number} of field '{field}' is {json_text(text)}; expected a text")
    return value


class TaggedText(Form):
    """The [data] keys for a file of columns, or a file of JSON lines."""

    #: A file with one word and its tag per line, and an empty line after each sentence; or .jsonl with lists of tokens
    #: and tags.
    text: Filled = Field(examples=["train.conll"])

    def as_source(self) -> TableSource:
        """Return the source that reads the sentences of the file."""
        path = user_path(self.text)
        if has_ending(path, ".jsonl"):
            return TaggedRows(JsonLinesFile(path, _FIELDS, raw=(*_FIELDS,)))
        return TaggedFile(path)


def read_tagged(source: TableSource, share: Share = WHOLE) -> DataTable:
    """Read sentences into a table with the columns "tokens" and "tags", which hold lists of texts.

    Args:
        source: the source of the sentences.
        share: the share of the rows to read, see `read_table`.

    Raises:
        InputError: the file is missing or unusable, or there is no sentence in the share.
    """
    return read_table(source, share, what="tagged sentence", row_keys=_group_keys)


def _group_keys(data: DataTable) -> tuple[list[list[tuple[str, ...]]], list[Hashable]]:
    """Return the words of each sentence, and its classes or entity types; a split keeps equal sentences together."""
    words = [[tuple(words)] for words in data["tokens"]]
    return words, [tuple({entity_type(tag): None for tag in tags}) for tags in data["tags"]]


def tagged_texts(source: TableSource, share: Share = WHOLE) -> list[str]:
    """Return the sentences of a source as texts, with a space between words, to train a tokenizer."""
    return [" ".join(words) for words in read_tagged(source, share)["tokens"]]


def _read_labelled_examples(options: Mapping[str, Any], train: LabelledExamples | None) -> LabelledExamples:
    """Read the training examples that the options of `clearhead new` name."""
    form = TaggedText(text=str(options["text"]))
    data = read_tagged(form.as_source())
    scheme = find_scheme(data)
    keys, groups = _group_keys(data)
    return LabelledExamples(
        table=form.model_dump(),
        what="sentences",
        texts=[(" ".join(words),) for words in data["tokens"]],
        keys=keys,
        groups=groups,
        record=lambda row: {field: list(data[field][row]) for field in _FIELDS},
        facts=f"; {len(learn_tags(data, scheme).names)} tags, scheme {scheme}",
        few="tagged sentences (an empty line ends one)",
    )


_EXAMPLES: Final = ListedExamples((_FIELDS,), (*_FIELDS,), TaggedRows)
DATA: Final = TaskData(
    TaskSection,
    (TaggedText,),
    _EXAMPLES,
    labelled=_read_labelled_examples,
    read=lambda source, share, task: read_tagged(source, share),
)
