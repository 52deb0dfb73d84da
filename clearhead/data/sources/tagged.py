"""Words with tags: columns in a file, JSON lines or a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clearhead.data.sources.lines import content_key, read_lines
from clearhead.data.sources.tables import WHOLE, Examples, JsonLinesFile, Share
from clearhead.errors import InputError, json_text

_FIELDS = ("tokens", "tags")
_DOCUMENT_MARK = "-DOCSTART-"


@dataclass(frozen=True)
class TaggedTexts:
    """Sentences of words with a tag for each.

    Args:
        words: the words of each sentence.
        tags: their tags.
        where: returns the place of word `word` of sentence `sentence`, both counted from 0.
    """

    words: Sequence[Sequence[str]]
    tags: Sequence[Sequence[str]]
    where: Callable[[int, int], str]

    def __len__(self) -> int:
        return len(self.words)


@dataclass(frozen=True)
class TaggedFile:
    """A file of sentences in columns.

    Args:
        path: a file, plain or .gz. Each line has a word in its first column and its tag in the last one, and an empty
            line ends a sentence; columns are separated by tabs if the first line has one, else by white space, and
            lines that mark the start of a document are skipped.
    """

    path: Path

    def read(self) -> TaggedTexts:
        """Read the sentences in file order."""
        words: list[list[str]] = []
        tags: list[list[str]] = []
        starts: list[int] = []
        is_open = False
        separator, width = None, 0
        for number, line in enumerate(read_lines(self.path), start=1):
            if not line.strip() or line.startswith(_DOCUMENT_MARK):
                is_open = False
                continue
            if not starts:
                separator = "\t" if "\t" in line else None
                width = len(line.split(separator))
            columns = line.split(separator)
            if len(columns) < 2 or not columns[0].strip() or not columns[-1].strip():
                between = "a tab" if separator else "white space"
                raise InputError(
                    f"{self.path}:{number}: expected a word and its tag with {between} between them, received "
                    f"{json_text(line)}"
                )
            if len(columns) != width:
                raise InputError(
                    f"{self.path}:{number}: this line has {len(columns)} columns and those before it {width}; expected "
                    f"in each line a word in the first column and its tag in the last, received {json_text(line)}"
                )
            if not is_open:
                words.append([])
                tags.append([])
                starts.append(number)
                is_open = True
            words[-1].append(columns[0])
            tags[-1].append(columns[-1].strip())
        return TaggedTexts(words, tags, lambda sentence, word: f"{self.path}:{starts[sentence] + word}")

    @property
    def name(self) -> str:
        """The source, for messages."""
        return str(self.path)

    def identity(self) -> list[object]:
        """Return JSON values that the sentences depend on."""
        return ["tagged", "columns", content_key(self.path)]


@dataclass(frozen=True)
class TaggedRows:
    """Sentences as rows of a table: JSON lines or a list.

    Args:
        table: its columns are the lists "tokens" and "tags".
    """

    table: JsonLinesFile | Examples

    def read(self) -> TaggedTexts:
        """Read the sentences in order; a sentence without words is skipped."""
        words, tags, numbers = [], [], []
        for number, values in self.table.rows():
            place = self.table.place(number)
            sentence, its_tags = (_texts(value, field, place) for field, value in zip(_FIELDS, values, strict=True))
            if len(sentence) != len(its_tags):
                raise InputError(f"{place}: expected a tag for each of {len(sentence)} words, got {len(its_tags)}")
            if sentence:
                words.append(sentence)
                tags.append(its_tags)
                numbers.append(number)
        return TaggedTexts(words, tags, lambda row, word: f"{self.table.place(numbers[row])}, word {word + 1}")

    @property
    def name(self) -> str:
        """The source, for messages."""
        return self.table.name if isinstance(self.table, Examples) else str(self.table.path)

    def identity(self) -> list[object]:
        """Return JSON values that the sentences depend on."""
        return ["tagged", *self.table.identity()]


TaggedSource = TaggedFile | TaggedRows


def _texts(value: object, field: str, place: str) -> list[str]:
    if not isinstance(value, list):
        raise InputError(f"{place}: field '{field}' is {json_text(value)}; expected a list of texts")
    for index, part in enumerate(value):
        if not isinstance(part, str) or not part.strip() or any("\ud800" <= letter <= "\udfff" for letter in part):
            raise InputError(f"{place}: item {index + 1} of field '{field}' is {json_text(part)}; expected a text")
    return value


def read_tagged(source: TaggedSource, share: Share = WHOLE) -> TaggedTexts:
    """Read the sentences of a source.

    Args:
        source: where they are.
        share: from which to which share of them, 0 to 1.

    Raises:
        InputError: the file is missing or unusable, or there is no sentence in the share.
    """
    found = source.read()
    first, last = (round(border * len(found)) for border in share)
    if not len(found):
        raise InputError(f"{source.name}: expected at least one tagged sentence, found none")
    if first == last:
        raise InputError(
            f"{source.name}: expected at least one tagged sentence from {share[0]:.0%} to {share[1]:.0%} of "
            f"the source, but all of it has {len(found)}"
        )
    return TaggedTexts(
        found.words[first:last], found.tags[first:last], lambda row, word: found.where(row + first, word)
    )


def tagged_texts(source: TaggedSource, share: Share = WHOLE) -> list[str]:
    """Return the sentences of a source as texts, with a space between words, to train a tokenizer on."""
    return [" ".join(words) for words in read_tagged(source, share).words]
