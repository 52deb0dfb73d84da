"""Where tagged words come from: columns in a file, or JSON lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.data.sources.lines import read_lines
from clearhead.data.sources.records import Form, content, field_value, parse_form, parse_record, path_of, shown
from clearhead.data.sources.texts import WHOLE, Share
from clearhead.errors import InputError

_TOKENS, _TAGS = "tokens", "tags"
_DOCUMENT_MARK = "-DOCSTART-"


@dataclass(frozen=True)
class TaggedColumns:
    """A file with a word and its tag in each line, and an empty line behind each sentence.

    Args:
        path: the file, plain or .gz; tabs part the columns where its first line has one, else white space does. The
            first column is the word and the last one its tag. Lines that mark the start of a document are left out.
    """

    path: Path

    def read(self) -> TaggedTexts:
        """Return the sentences in file order."""
        words: list[list[str]] = []
        tags: list[list[str]] = []
        starts: list[int] = []
        is_open = False
        separator: str | None = None
        for number, line in enumerate(read_lines(self.path), start=1):
            if not line.strip() or line.startswith(_DOCUMENT_MARK):
                is_open = False
                continue
            if not starts:
                separator = "\t" if "\t" in line else None
            columns = line.split(separator)
            if len(columns) < 2 or not columns[0].strip() or not columns[-1].strip():
                between = "a tab" if separator else "white space"
                raise InputError(
                    f"{self.path}:{number}: expected a word and its tag with {between} between them, received "
                    f"{shown(line)}"
                )
            if not is_open:
                words.append([])
                tags.append([])
                starts.append(number)
                is_open = True
            words[-1].append(columns[0])
            tags[-1].append(columns[-1].strip())
        return TaggedTexts(words, tags, lambda sentence, word: f"{self.path}:{starts[sentence] + word}")

    def identity(self) -> list[str]:
        """Return what the sentences depend on."""
        return ["tagged columns", content(self.path)]


@dataclass(frozen=True)
class TaggedJsonLines:
    """One file with a JSON object in each line, its field "tokens" a list of words and "tags" a list of their tags.

    Args:
        path: the file, plain or .gz.
    """

    path: Path

    def read(self) -> TaggedTexts:
        """Return the sentences in file order; one without words is left out."""
        words, tags, numbers = [], [], []
        for number, line in enumerate(read_lines(self.path), start=1):
            place = f"{self.path}:{number}"
            record = parse_record(line, place)
            sentence, of_sentence = (_texts(record, field, place) for field in (_TOKENS, _TAGS))
            if len(sentence) != len(of_sentence):
                raise InputError(f"{place}: expected a tag for each of {len(sentence)} words, got {len(of_sentence)}")
            if sentence:
                words.append(sentence)
                tags.append(of_sentence)
                numbers.append(number)
        return TaggedTexts(words, tags, lambda row, word: f"{self.path}:{numbers[row]}, word {word + 1}")

    def identity(self) -> list[str]:
        """Return what the sentences depend on."""
        return ["tagged jsonl", content(self.path)]


TaggedSource = TaggedColumns | TaggedJsonLines


def _texts(record: object, field: str, place: str) -> list[str]:
    value = field_value(record, field, place)
    if not isinstance(value, list):
        raise InputError(f"{place}: field '{field}' is {shown(value)}; expected a list of texts")
    for index, part in enumerate(value):
        if not isinstance(part, str) or not part.strip() or any("\ud800" <= letter <= "\udfff" for letter in part):
            raise InputError(f"{place}: item {index + 1} of field '{field}' is {shown(part)}; expected a text")
    return value


def parse_tagged_source(table: Mapping[str, Any]) -> TaggedSource:
    """Turn a table of a run file, such as { text = "t.conll" }, into a source.

    Args:
        table: the key "text".

    Raises:
        InputError: every unknown or missing key and every wrong type, in one report.
    """

    def faults(key: str, value: object) -> list[str]:
        return [] if isinstance(value, str) and value else [f"'{key}' is {value!r}; expected the name of a file"]

    return parse_form(table, _FORMS, expected="text", value_faults=faults)


def _make_source(table: Mapping[str, Any]) -> TaggedSource:
    path = path_of(table["text"])
    is_json = path.name.removesuffix(".gz").endswith(".jsonl")
    return TaggedJsonLines(path) if is_json else TaggedColumns(path)


_FORMS: tuple[Form[TaggedSource], ...] = (Form("text", (), (), _make_source),)


def read_tagged(source: TaggedSource, share: Share = WHOLE) -> TaggedTexts:
    """Return all sentences of a source, in order, as they stand there.

    Args:
        source: where they are.
        share: from which to which share of them, 0 to 1.

    Raises:
        InputError: the file is missing or unusable, or the share holds none.
    """
    found = source.read()
    first, last = (round(border * len(found)) for border in share)
    if first == last:
        raise InputError(
            f"{source.path}: expected at least one tagged sentence from {share[0]:.0%} to {share[1]:.0%} of the file, "
            f"but all of it has {len(found)}"
        )
    return TaggedTexts(
        found.words[first:last], found.tags[first:last], lambda row, word: found.where(row + first, word)
    )


def tagged_texts(source: TaggedSource, share: Share = WHOLE) -> list[str]:
    """Return the sentences of a source as texts, a space between words: what a tokenizer is trained on."""
    return [" ".join(words) for words in read_tagged(source, share).words]


@dataclass(frozen=True)
class TaggedTexts:
    """Sentences of words with a tag for each.

    Args:
        words: the words of each sentence.
        tags: their tags.
        where: says where word `word` of sentence `sentence` stands, both counted from 0.
    """

    words: Sequence[Sequence[str]]
    tags: Sequence[Sequence[str]]
    where: Callable[[int, int], str]

    def __len__(self) -> int:
        return len(self.words)
