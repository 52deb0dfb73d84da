"""Sources of running text: files, folders, JSON lines, a Hugging Face data set or a list, streamed as documents.

No source is held in memory as a whole. A document may come in several chunks; the first one has `starts` = True.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Final, Literal, NamedTuple

from pydantic import Field

from clearhead.base.errors import InputError, key
from clearhead.data.sources.lines import content_key, empty_file, split_lines, stream_text
from clearhead.data.sources.run_file_tables import Filled, Form, has_ending, user_path
from clearhead.data.sources.tables import TABLE_FORMATS, Dataset, Examples, JsonLinesFile, Share

DocumentKind = Literal["file", "line", "paragraph"]

_EVERY_FILE = "*"
_KEYS = {"text": "field"}
_JSON_LINES = ".jsonl"


class TextChunk(NamedTuple):
    """A chunk of a document.

    Args:
        text: the characters of the chunk; never empty.
        starts: True if a new document starts with this chunk.
        origin: the file or the record of the text.
        line: the line of the file at which the chunk starts, counted from 1; 0 if the origin has no lines.
    """

    text: str
    starts: bool
    origin: str
    line: int

    @property
    def location(self) -> str:
        """The location of the chunk, for messages."""
        return f"{self.origin}:{self.line}" if self.line else self.origin


@dataclass(frozen=True)
class TextFiles:
    """A source of text files: one file, or all files in a folder and its subfolders, in the order of their names.

    Args:
        path: a file, plain or .gz; or a folder, in which hidden and empty files are skipped.
        document: the unit of a document: a file, a line, or a paragraph (lines up to an empty line).
        pattern: the pattern of the files to read in a folder, such as "*.py".
        field: the field of the texts in files of JSON lines (*.jsonl). None means "text".
    """

    path: Path
    document: DocumentKind = "file"
    pattern: str = _EVERY_FILE
    field: str | None = None

    def files(self) -> list[Path]:
        """Return the files to read.

        Raises:
            InputError: no file matches the pattern, a field is set without JSON lines, a file is a table, or a folder
                cannot be read.
        """
        if not self.path.is_dir():
            self._refuse_table(self.path)
            return [self.path]
        every = list(_visible_files(self.path))
        matching = [path for path in every if path.match(self.pattern)]
        if not every:
            raise InputError(f"{self.path}: there is no file in this folder; expected text files")
        if not matching:
            endings = sorted({path.suffix for path in every if path.suffix})
            there = f"its files end in {', '.join(endings[:8])}" if endings else "it has no files with an ending"
            raise InputError(f"{self.path}: no file in this folder matches '{self.pattern}'; {there}")
        if self.field is not None and not any(has_ending(path.name, _JSON_LINES) for path in matching):
            raise InputError(key("field") + f" belongs to JSON lines, but no file in {self.path} ends in .jsonl")
        files = [self.path / path for path in sorted(matching, key=PurePath.as_posix)]
        for path in files:
            self._refuse_table(path)
        return files

    def _refuse_table(self, path: Path) -> None:
        """Refuse a table that is not JSON lines, even if its text is in the cache."""
        if has_ending(path, *TABLE_FORMATS):
            advice = f' (in a run file with dataset = "{path}", split = "train")'
            other = "" if path == self.path else "; or read other files of the folder with " + key("pattern")
            raise InputError(f"{path} is a table: name the column of its texts with " + key("field") + advice + other)

    def chunks(self) -> Iterator[TextChunk]:
        """Yield the documents, chunk by chunk."""
        for path in self.files():
            yield from self.chunks_of(path)

    def chunks_of(self, path: Path) -> Iterator[TextChunk]:
        """Yield the documents of one file, chunk by chunk.

        Raises:
            InputError: the file cannot be read as text.
        """
        if has_ending(path, _JSON_LINES):
            if any(stream_text(path)):
                table = JsonLinesFile(path, {"text": self.field or "text"}, keys=_KEYS)
                yield from TextRows(table, self.document).chunks()
            return
        texts = stream_text(path) if path == self.path else self._stream_member(path)
        is_empty = True
        for chunk in _cut_documents(texts, self.document, str(path), first_line=1):
            is_empty = False
            yield chunk
        if is_empty and path == self.path and not any(stream_text(path)):
            raise empty_file(path)

    def _stream_member(self, path: Path) -> Iterator[str]:
        try:
            yield from stream_text(path)
        except InputError as error:
            others = Counter(file.suffix for file in self.files() if file.suffix not in ("", path.suffix))
            ending = next((name for name, _ in others.most_common(1)), "")
            advice = key("pattern", f"*{ending}") if ending else "only the texts in the folder"
            raise InputError(f"{error}; or leave it out: " + advice) from None

    def location(self, index: int) -> str:
        """Return the location of the start of document `index`, counted from 0."""
        return _find_location(self.chunks(), index, str(self.path))

    def identity(self) -> list[object]:
        """Return JSON values that identify the documents."""
        files = [(has_ending(path, _JSON_LINES), content_key(path)) for path in self.files()]
        return ["text", self.document, self.field, files]


@dataclass(frozen=True)
class TextRows:
    """A source of the texts of a table: JSON lines, a data set or a list.

    Args:
        table: the table; its only column is "text".
        document: the unit of a document: a line or a paragraph of a text, or "file" for each whole text.
    """

    table: JsonLinesFile | Dataset | Examples
    document: DocumentKind = "file"

    def chunks(self) -> Iterator[TextChunk]:
        """Yield the documents, chunk by chunk."""
        for number, (text,) in self.table.rows():
            yield from _cut_documents(
                [text.replace("\r\n", "\n")], self.document, self.table.location(number), first_line=0
            )

    def location(self, index: int) -> str:
        """Return the location of document `index`, counted from 0."""
        first, _ = next(self.table.rows(), (0, ()))
        return _find_location(self.chunks(), index, self.table.location(first))

    def identity(self) -> list[object]:
        """Return JSON values that identify the documents."""
        return ["text", self.document, *self.table.identity()]


TextSource = TextFiles | TextRows


@dataclass(frozen=True)
class TextShard:
    """One file of a streamed text.

    Args:
        path: the file.
        chunks: a function that yields the documents of the file, chunk by chunk.
    """

    path: Path
    chunks: Callable[[], Iterator[TextChunk]]


def text_shards(source: TextSource) -> list[TextShard]:
    """Return the files of a text, in the order of their names.

    Raises:
        InputError: the text is not in files, or there is no file.
    """
    if isinstance(source, TextFiles):
        return [TextShard(path, partial(source.chunks_of, path)) for path in source.files()]
    if isinstance(source.table, JsonLinesFile):
        return [TextShard(source.table.path, source.chunks)]
    raise InputError(f"{source.table.name} is not in text files, so it cannot be streamed: leave out " + key("stream"))


@dataclass(frozen=True)
class TextSize:
    """The size of a text source.

    Args:
        documents: the number of documents.
        characters: the number of characters in all documents.
    """

    documents: int
    characters: int


def measure(source: TextSource) -> TextSize:
    """Count documents and characters of a text source by reading it, so that faults in it are found early.

    Raises:
        InputError: the source cannot be read, or has nothing but white space.
    """
    documents = characters = 0
    for chunk in source.chunks():
        documents += chunk.starts
        characters += len(chunk.text)
    if not documents:
        raise InputError(f"{source.location(0)}: expected text, found nothing but white space")
    return TextSize(documents, characters)


def read_chunks(source: TextSource, share: Share, size: TextSize) -> Iterator[TextChunk]:
    """Yield a share of the documents of a source, such as the first 90 %, chunk by chunk.

    Args:
        source: the source of the text.
        share: the start and the end of the share, each from 0 to 1. They count documents, or characters if there is
            only one document. Shares that meet at one number neither overlap nor leave a gap.
        size: the result of `measure`.

    Raises:
        InputError: the source cannot be read, or the share is not a range or is empty.
    """
    begin, end = share
    if not 0 <= begin < end <= 1:
        raise InputError(f"the share of a text is {begin} to {end}; expected two rising numbers from 0 to 1")
    by_characters = size.documents == 1
    total = size.characters if by_characters else size.documents
    first, last = int(begin * total), int(end * total)
    if first == last:
        unit = "character" if by_characters else "document"
        raise InputError(
            f"{source.location(0)}: no whole {unit} is in the share {begin:g} to {end:g} of {total} {unit}s; "
            "give more text, or give the validation text separately"
        )
    yield from (_select_characters if by_characters else _select_documents)(source.chunks(), first, last)


def _select_documents(chunks: Iterable[TextChunk], first: int, last: int) -> Iterator[TextChunk]:
    """Yield the documents from number `first` up to, but not including, number `last`."""
    number = -1
    for chunk in chunks:
        number += chunk.starts
        if number >= last:
            return
        if number >= first:
            yield chunk


def _select_characters(chunks: Iterable[TextChunk], first: int, last: int) -> Iterator[TextChunk]:
    """Yield the characters of one document from number `first` up to, but not including, number `last`."""
    position, starts = 0, True
    for chunk in chunks:
        text = chunk.text[max(0, first - position) : max(0, last - position)]
        position += len(chunk.text)
        if text:
            yield chunk._replace(text=text, starts=starts)
            starts = False
        if position >= last:
            return


def _cut_documents(
    texts: Iterable[str], document: DocumentKind, origin: str, *, first_line: int
) -> Iterator[TextChunk]:
    """Cut the text of a file or a record into documents; white space alone is not a document."""
    if document == "file":
        return _stream_document(texts, origin, first_line)
    lines = enumerate(split_lines(texts), start=1)
    if document == "line":
        return (TextChunk(line, True, origin, number * first_line) for number, line in lines if line.strip())
    return _cut_paragraphs(lines, origin, first_line)


def _stream_document(texts: Iterable[str], origin: str, first_line: int) -> Iterator[TextChunk]:
    blank: list[str] = []
    starts = True
    for text in texts:
        if starts and not text.strip():
            blank.append(text)
            continue
        yield TextChunk("".join(blank) + text if starts else text, starts, origin, first_line)
        blank, starts = [], False


def _cut_paragraphs(lines: Iterable[tuple[int, str]], origin: str, first_line: int) -> Iterator[TextChunk]:
    begun: list[str] = []
    first = 0
    for number, line in lines:
        if line.strip():
            first = first if begun else number
            begun.append(line)
        elif begun:
            yield TextChunk("\n".join(begun), True, origin, first * first_line)
            begun = []
    if begun:
        yield TextChunk("\n".join(begun), True, origin, first * first_line)


def _find_location(chunks: Iterable[TextChunk], index: int, default: str) -> str:
    starting = (chunk for chunk in chunks if chunk.starts)
    return next((chunk.location for number, chunk in enumerate(starting) if number == index), default)


def _visible_files(folder: Path) -> Iterator[PurePath]:
    """Yield the files below a folder as relative paths; hidden files and links to folders are skipped."""

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename}: the folder cannot be read ({error.strerror or error})")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield PurePath(parent, name).relative_to(folder)


class TextTable(Form):
    """The [data] keys for running text in a file, a folder of files, or JSON lines."""

    #: A file, a folder of files, or a .jsonl file; of JSON lines, also in a folder, one field is read.
    text: Filled = Field(examples=["train.txt"])
    #: The field of the texts in .jsonl files; default: text.
    field: Filled | None = None
    #: The unit of a document: a file, a line, or a paragraph.
    document: DocumentKind | None = None
    #: The pattern of the files to read in a folder, such as *.md.
    pattern: Filled | None = None

    def as_source(self) -> TextSource:
        """Return the source that reads the text as documents."""
        path, document = user_path(self.text), self.document or "file"
        if self.pattern is not None and (path.is_file() or has_ending(path, _JSON_LINES)):
            raise InputError(
                key("pattern") + f" chooses files of a folder, but {path} is a file; leave " + key("pattern") + " out"
            )
        if has_ending(path, _JSON_LINES) and not path.is_dir():
            return TextRows(JsonLinesFile(path, {"text": self.field or "text"}, keys=_KEYS), document)
        if self.field is not None and not path.is_dir():
            raise InputError(
                key("field")
                + f" belongs to JSON lines, but {path} does not end in .jsonl; leave "
                + key("field")
                + " out"
            )
        return TextFiles(path, document, self.pattern or _EVERY_FILE, self.field)


class TextDataset(Form):
    """The [data] keys for running text in a Hugging Face data set, or in a table in a file."""

    #: The name on the hub, a folder, or a table: a .parquet, .csv, .tsv or .json file.
    dataset: Filled = Field(examples=["name"])
    #: The split to read.
    split: Filled = Field(examples=["train"])
    #: The configuration, if the data set has several.
    config: Filled | None = None
    #: A branch, a tag or a commit of the hub; default: the newest.
    revision: Filled | None = None
    #: The field of the texts; default: text.
    field: Filled | None = None
    #: The unit of a document: a record, a line, or a paragraph.
    document: DocumentKind | None = None

    def as_source(self) -> TextSource:
        """Return the source that reads the texts in one field of the data set."""
        fields = {"text": self.field or "text"}
        rows = Dataset(self.dataset, self.split, fields, self.config, keys=_KEYS, revision=self.revision)
        return TextRows(rows, self.document or "file")


TEXT_FORMS: Final[tuple[type[Form], ...]] = (TextTable, TextDataset)
