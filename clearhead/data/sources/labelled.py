"""Where labelled texts come from: a table, JSON lines, aligned files, or a Hugging Face data set."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.data.sources.lines import read_lines
from clearhead.data.sources.records import (
    Form,
    column_position,
    content,
    field_value,
    load_named,
    parse_form,
    parse_record,
    path_of,
    text_field,
)
from clearhead.data.sources.texts import WHOLE, Share
from clearhead.errors import InputError

TEXT = "text"
_SEPARATORS = ((".tsv", "\t"), (".csv", ","))
_JSON_LINES = ".jsonl"


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with their labels as they stand in a source.

    Args:
        texts: the texts, or the first of each pair.
        others: the second of each pair; None where texts stand alone.
        labels: what stands as label: a text, a number, a list, or nothing.
        numbers: where each example stands, as its source counts.
        where: says for such a number where that is.
    """

    texts: Sequence[str]
    others: Sequence[str] | None
    labels: Sequence[object]
    numbers: Sequence[int]
    where: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.texts)

    def place(self, index: int) -> str:
        """Return where example number `index`, counted from 0, stands."""
        return self.where(self.numbers[index])

    def part(self, share: Share) -> LabelledTexts:
        """Return the examples from one share of them, 0 to 1, up to another."""
        rows = slice(*(round(border * len(self)) for border in share))
        others = None if self.others is None else self.others[rows]
        return LabelledTexts(self.texts[rows], others, self.labels[rows], self.numbers[rows], self.where)


@dataclass(frozen=True)
class LabelledTable:
    """A file of columns, separated by tabs where quotes have no meaning (.tsv), or by commas with quotes (.csv).

    Args:
        path: the file; its name ends in .tsv or .csv, or in one of these and .gz.
        labels: a column counted from 0, or its name in the first line; once a column is named, the first line is no
            example.
        text: the column of the text; None: the one named "text", or where columns have no names the first that is
            left.
        other: the column of the second text of a pair; None: texts stand alone.
    """

    path: Path
    labels: int | str
    text: int | str | None = None
    other: int | str | None = None

    def read(self) -> LabelledTexts:
        """Return the examples in file order."""
        numbers, rows = self._rows()
        first = 0
        if any(isinstance(column, str) for column in (self.labels, self.text, self.other)):
            first = 1
        positions = self._positions(numbers[0], rows[0])
        needed = max(positions.values()) + 1
        for number, row in zip(numbers[first:], rows[first:], strict=True):
            if len(row) < needed:
                name = "tabs" if self._separator == "\t" else "commas"
                raise InputError(
                    f"{self.place(number)}: expected at least {needed} columns separated by {name}, received {len(row)}"
                )
        columns = {role: [row[position] for row in rows[first:]] for role, position in positions.items()}
        return LabelledTexts(columns["text"], columns.get("other"), columns["labels"], numbers[first:], self.place)

    @property
    def _separator(self) -> str:
        name = self.path.name.removesuffix(".gz")
        return next(separator for ending, separator in _SEPARATORS if name.endswith(ending))

    def _rows(self) -> tuple[list[int], list[list[str]]]:
        lines = read_lines(self.path)
        if self._separator == "\t":
            return list(range(1, len(lines) + 1)), [line.split("\t") for line in lines]
        reader = csv.reader((f"{line}\n" for line in lines), strict=True)
        numbers: list[int] = []
        rows: list[list[str]] = []
        while True:
            number = reader.line_num + 1
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise InputError(
                    f"{self.place(number)}: expected columns separated by commas, with texts that hold one or a quote "
                    f'in "quotes" ({error})'
                ) from None
            if row is None:
                return numbers, rows
            if row:
                numbers.append(number)
                rows.append(row)

    def _positions(self, number: int, names: Sequence[str]) -> dict[str, int]:
        place = self.place(number)
        given = {"labels": self.labels, "other": self.other, "text": self.text}
        found = {role: column_position(column, names, place) for role, column in given.items() if column is not None}
        if self.text is None and isinstance(self.labels, str):
            if TEXT not in names:
                raise InputError(
                    f"{place}: there is no column '{TEXT}'; the first line names {', '.join(map(repr, names))}: say "
                    "with text_column which of them holds the text"
                )
            found["text"] = list(names).index(TEXT)
        elif self.text is None:
            found["text"] = next(column for column in range(len(found) + 1) if column not in found.values())
        if len(set(found.values())) < len(found):
            raise InputError(f"{place}: text, labels and pair must be different columns, but two of them are the same")
        return found

    def place(self, number: int) -> str:
        """Return where the example that begins in a line, counted from 1, stands."""
        return f"{self.path}:{number}"

    def identity(self) -> list[str]:
        """Return what the examples depend on."""
        columns = [repr(column) for column in (self.labels, self.text, self.other)]
        return ["labelled table", self._separator, content(self.path), *columns]


@dataclass(frozen=True)
class LabelledJsonLines:
    """One file with a JSON object in each line.

    Args:
        path: the file, plain or .gz.
        labels: the field of the label; "a.b" is field "b" of field "a".
        text: the field of the text.
        other: the field of the second text of a pair; None: texts stand alone.
    """

    path: Path
    labels: str
    text: str = TEXT
    other: str | None = None

    def read(self) -> LabelledTexts:
        """Return the examples in file order."""
        lines = read_lines(self.path)
        places = [self.place(number) for number in range(1, len(lines) + 1)]
        records = [parse_record(line, place) for line, place in zip(lines, places, strict=True)]
        return _from_records(zip(records, places, strict=True), self, lambda value, place: value)

    def place(self, number: int) -> str:
        """Return where the example of a line, counted from 1, stands."""
        return f"{self.path}:{number}"

    def identity(self) -> list[str]:
        """Return what the examples depend on."""
        return ["labelled jsonl", content(self.path), self.labels, self.text, repr(self.other)]


@dataclass(frozen=True)
class LabelledFiles:
    """A file of texts and a file of labels whose lines belong together one to one.

    Args:
        text: the file of texts, plain or .gz.
        labels: the file of labels.
        other: the file of the second texts of pairs; None: texts stand alone.
    """

    text: Path
    labels: Path
    other: Path | None = None

    def read(self) -> LabelledTexts:
        """Return the examples in file order."""
        texts = read_lines(self.text)
        if not self.labels.exists():
            raise InputError(
                f"{self.labels}: there is no such file with a label for each line of {self.text}; a column of a table "
                "can be named where the text's file ends in .tsv, .csv or .jsonl"
            )
        labels, others = read_lines(self.labels), None if self.other is None else read_lines(self.other)
        for path, lines in ((self.labels, labels), (self.other, others)):
            if lines is not None and len(lines) != len(texts):
                raise InputError(
                    f"{self.text} has {len(texts)} lines, but {path} has {len(lines)}; expected one for each line "
                    "of text"
                )
        return LabelledTexts(texts, others, labels, range(1, len(texts) + 1), self.place)

    def place(self, number: int) -> str:
        """Return where the example of a line, counted from 1, stands: the place of its label."""
        return f"{self.labels}:{number}"

    def identity(self) -> list[str]:
        """Return what the examples depend on."""
        other = "" if self.other is None else content(self.other)
        return ["labelled files", content(self.text), content(self.labels), other]


@dataclass(frozen=True)
class LabelledDataset:
    """A data set that the `datasets` library loads by name; classes it numbers are called by their names.

    Args:
        name: the name on the Hugging Face hub, or a local folder.
        split: the part to read, such as "train".
        labels: the field of the label; "a.b" is field "b" of field "a".
        text: the field of the text.
        other: the field of the second text of a pair; None: texts stand alone.
        config: which configuration of the data set, where it has several.
    """

    name: str
    split: str
    labels: str
    text: str = TEXT
    other: str | None = None
    config: str | None = None

    def read(self) -> LabelledTexts:
        """Return the examples in the order of the data set."""
        rows = load_named(self.name, self.config, self.split)
        names = _class_names(getattr(rows, "features", None), self.labels)
        places = (self.place(number) for number in range(len(rows)))
        return _from_records(zip(rows, places, strict=True), self, lambda value, place: _named(value, names, place))

    def place(self, number: int) -> str:
        """Return where the example of a row, counted from 0, stands."""
        return f"{self.name}[{self.split}] row {number}"

    def identity(self) -> list[str]:
        """Return what the examples depend on."""
        fingerprint = str(getattr(load_named(self.name, self.config, self.split), "_fingerprint", ""))
        fields = [self.text, self.labels, repr(self.other)]
        return ["labelled dataset", self.name, str(self.config), self.split, *fields, fingerprint]


LabelledSource = LabelledTable | LabelledJsonLines | LabelledFiles | LabelledDataset


def read_labelled(source: LabelledSource, share: Share = WHOLE) -> LabelledTexts:
    """Return all examples of a source, in order, as they stand there.

    Args:
        source: where they are.
        share: from which to which share of them, 0 to 1.

    Raises:
        InputError: a file, column or field is missing or unusable, or files have unequal line counts.
    """
    found = source.read()
    if not len(found):
        raise InputError(f"{source.place(1)}: expected at least one labelled text, found none")
    part = found.part(share)
    if not len(part):
        raise InputError(
            f"{found.place(0)}: the part from {share[0]:.0%} to {share[1]:.0%} of {len(found)} labelled texts is empty"
        )
    return part


def labelled_texts(source: LabelledSource, share: Share = WHOLE) -> list[str]:
    """Return the texts of a source without their labels, those of pairs one by one: what a tokenizer is trained on."""
    found = read_labelled(source, share)
    return [*found.texts, *(found.others or ())]


def parse_labelled_source(table: Mapping[str, Any]) -> LabelledSource:
    """Turn a table of a run file, such as { text = "t.tsv", labels = "label" }, into a source.

    Args:
        table: "text" and "labels", with "text_column" and "pair" where the text's file is a table or JSON lines; or
            "dataset" and "labels", with "split", "field", "pair" and "config".

    Raises:
        InputError: every unknown or missing key and every wrong type, in one report.
    """
    name = str(table.get(TEXT, ""))
    may_count = TEXT in table and _is_table(name)
    if TEXT in table and "text_column" in table and not may_count and not _is_json_lines(name):
        raise InputError(
            f"'text_column' is for a table, but the text is '{name}'; expected a name that ends in .tsv, .csv or .jsonl"
        )
    return parse_form(
        table,
        _FORMS,
        expected="text and labels; or dataset and labels",
        value_faults=lambda key, value: _value_faults(key, value, may_count=may_count),
    )


def labelled_table(text: Path, labels: str, *, text_column: str | None, pair: str | None) -> dict[str, Any]:
    """Return the [data] table of a run file for labelled texts named on a command line.

    Args:
        text: the file of the texts.
        labels: the column of their labels, or a file of them.
        text_column: the column of the texts.
        pair: the column of the second texts, or a file of them.
    """
    values = {"labels": labels, "text_column": text_column, "pair": pair}
    given = {key: value for key, value in values.items() if value is not None}
    # A column of a table is a name or, as in a run file, a number counted from 0.
    is_table = _is_table(text.name)
    columns = {key: int(value) if is_table and value.isdecimal() else value for key, value in given.items()}
    return {"text": str(text), **columns}


def _value_faults(key: str, value: object, *, may_count: bool) -> list[str]:
    may_count = may_count and key in ("labels", "text_column", "pair")
    if isinstance(value, str) and value:
        return []
    if may_count and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return []
    expected = "a column number from 0 or a column name" if may_count else "a text that is not empty"
    return [f"'{key}' is {value!r}; expected {expected}"]


def _make_text(table: Mapping[str, Any]) -> LabelledSource:
    path, labels, other = path_of(table[TEXT]), table["labels"], table.get("pair")
    if _is_table(path.name):
        return LabelledTable(path, labels, table.get("text_column"), other)
    if _is_json_lines(path.name):
        return LabelledJsonLines(path, labels, table.get("text_column", TEXT), other)
    return LabelledFiles(path, path_of(labels), None if other is None else path_of(other))


def _make_dataset(table: Mapping[str, Any]) -> LabelledSource:
    return LabelledDataset(
        name=table["dataset"],
        split=table.get("split", "train"),
        labels=table["labels"],
        text=table.get("field", TEXT),
        other=table.get("pair"),
        config=table.get("config"),
    )


_FORMS: tuple[Form[LabelledSource], ...] = (
    Form(TEXT, ("labels",), ("text_column", "pair"), _make_text),
    Form("dataset", ("labels",), ("split", "field", "pair", "config"), _make_dataset),
)


def _is_table(name: str) -> bool:
    return name.removesuffix(".gz").endswith(tuple(ending for ending, _ in _SEPARATORS))


def _is_json_lines(name: str) -> bool:
    return name.removesuffix(".gz").endswith(_JSON_LINES)


def _from_records(
    records: Iterable[tuple[object, str]],
    source: LabelledJsonLines | LabelledDataset,
    label: Callable[[object, str], object],
) -> LabelledTexts:
    texts, others, labels = [], [], []
    for record, place in records:
        texts.append(text_field(record, source.text, place))
        if source.other is not None:
            others.append(text_field(record, source.other, place))
        labels.append(label(field_value(record, source.labels, place), place))
    first = 0 if isinstance(source, LabelledDataset) else 1
    numbers = range(first, first + len(texts))
    return LabelledTexts(texts, others if source.other is not None else None, labels, numbers, source.place)


def _class_names(features: Any, field: str) -> Sequence[str] | None:
    """Return the names of a data set's numbered classes; for lists of classes they belong to the items."""
    try:
        feature = features[field]
    except (KeyError, TypeError):
        return None
    names = getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)
    return None if names is None else list(names)


def _named(value: object, names: Sequence[str] | None, place: str) -> object:
    if names is None:
        return value
    if isinstance(value, list):
        return [_named(item, names, place) for item in value]
    if not isinstance(value, int):
        return value
    if not 0 <= value < len(names):
        raise InputError(
            f"{place}: class {value} has no name among the {len(names)} of the data set; "
            "the labels of this split may be hidden: use another split"
        )
    return names[value]
