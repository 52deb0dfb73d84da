"""Tables: sources of rows (files of lines, columns or JSON, a data set, a list) and the columns read from them."""

from __future__ import annotations

import csv
import importlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from clearhead.base.commands import make_install_command
from clearhead.base.errors import InputError, Message, did_you_mean, json_text, key
from clearhead.base.progress import message
from clearhead.data.sources.held_out import Keys, Labels, draw_rows
from clearhead.data.sources.lines import content_key, empty_file, read_lines, stream_lines
from clearhead.data.sources.run_file_tables import has_ending, user_path


def describe_misalignment(first: Path, lines: Sequence[str], second: Path, others: Sequence[str]) -> str:
    """Return a sentence that names the first line of the longer file that seems to have no partner."""
    path, longer, shorter = (first, lines, others) if len(lines) > len(others) else (second, others, lines)
    line = find_misaligned_line(longer, shorter)
    if line > len(shorter):
        return f"{path}:{line} and the lines after it have no partner, or the other file was cut short"
    return (
        f"judged by line lengths, the first line without a partner is {path}:{line} "
        f"({json_text(longer[line - 1])} next to {json_text(shorter[line - 1])})"
    )


def find_misaligned_line(longer: Sequence[str], shorter: Sequence[str]) -> int:
    """Return the line, counted from 1, at which two files of unequal length most likely lose their alignment.

    The estimate assumes that one block of lines is missing in the shorter file. Translations have a steady ratio of
    lengths, so the gap is where the ratios before it and after it are as steady as possible.

    Args:
        longer: the lines of the longer file.
        shorter: the lines of the shorter file.

    Returns:
        The number of the first line of `longer` without a partner; len(shorter) + 1 if the extra lines are at the end.

    Source: the length-based cost follows Gale and Church 1993, with a median ratio in place of their fitted one.
    """
    surplus = len(longer) - len(shorter)
    long, short = _log_lengths(longer), _log_lengths(shorter)
    centre = float(np.median(long)) - float(np.median(short))
    before = np.abs(long[: len(short)] - short - centre)
    after = np.abs(long[surplus:] - short - centre)
    # cost[k]: lines before k are paired with equal numbers, lines from k on with those after the gap
    cost = np.concatenate([[0.0], np.cumsum(before)]) + (after.sum() - np.concatenate([[0.0], np.cumsum(after)]))
    # The last of equal costs: a gap may follow lines that fit either way, and gaps are usually at the end.
    best = len(cost) - 1 - int(np.argmin(cost[::-1]))
    return best + 1


def _log_lengths(lines: Sequence[str]) -> Float64[ndarray, " lines"]:
    return np.log1p(np.fromiter(map(len, lines), dtype=np.float64, count=len(lines)))


Column = int | str
Row = tuple[Any, tuple[Any, ...]]
"""The number of a row in its source, such as a line number, and the values of the row."""
Share = tuple[float, float]
WHOLE: Share = (0.0, 1.0)

# The name of each separator, and the fix for a line with too many of them.
_SEPARATORS = {
    "\t": ("tabs", "a text cannot hold a tab: write a space in its place"),
    ",": ("commas", 'put a text that holds a comma into "quotes"'),
}
_OTHER_SEPARATORS = {
    "\t": "tabs, give the file a name that ends in .tsv",
    ";": "semicolons, write tabs or commas instead",
    "|": "bars, write tabs or commas instead",
    ",": "commas, give the file a name that ends in .csv",
}
_OTHERWISE = "another character, write tabs or commas instead"
_MOST_SHOWN = 12
_LONGEST_CELL = 2**31 - 1
# A cell is quoted, with inner quotes doubled, or contains neither a quote nor a comma.
_CELL = r'(?:"[^"]*(?:""[^"]*)*"|[^",\n]*)'
_CSV_ROW = re.compile(rf"{_CELL}(?:,{_CELL})*")
_CSV_CELLS = re.compile(rf"(?:{_CELL},)*{_CELL}")
TABLE_FORMATS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    ".parquet": ("parquet", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".ndjson": ("json", {}),
}
"""Tables in files that the `datasets` library reads: for each file ending its format and options."""


@dataclass(frozen=True)
class DataTable:
    """Table of the rows that were read from a source, stored as columns.

    Args:
        columns: the values of each column by role, such as "source" or "label".
        numbers: the number of each row in its source.
        where: a function that returns the location of a row, or of an item in the row such as a word, for messages.
    """

    columns: Mapping[str, Sequence[Any]]
    numbers: Sequence[Any]
    where: Callable[..., str]

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, role: str) -> bool:
        return role in self.columns

    def __getitem__(self, role: str) -> Sequence[Any]:
        return self.columns[role]

    def select(self, rows: Sequence[int]) -> DataTable:
        """Return a table with only the rows at the given indices, counted from 0."""
        columns = {role: [values[row] for row in rows] for role, values in self.columns.items()}
        return DataTable(columns, [self.numbers[row] for row in rows], self.where)

    def location(self, index: int, *item: int) -> str:
        """Return the location of row `index`, or of an item in the row, such as a word; both are counted from 0."""
        return self.where(self.numbers[index], *item)


@runtime_checkable
class TableSource(Protocol):
    """A source of rows with named columns."""

    @property
    def columns(self) -> Collection[str]:
        """The roles of the values of a row, in order."""

    def rows(self) -> Iterator[Row]:
        """Yield the rows in order."""

    def location(self, number: Any) -> str:
        """Return the location of the row with this number, for messages."""

    def identity(self) -> list[object]:
        """Return JSON values that identify the rows."""


@dataclass(frozen=True)
class AlignedFiles:
    """A source of aligned files: lines with the same number form a row.

    Args:
        columns: the file of each role, plain or .gz; the first file decides the number of lines.
        located_by: the role whose file is named in the location of a row.
        is_parallel: True if the lines are translations of each other; then their lengths show where a line is missing.
    """

    columns: Mapping[str, Path]
    located_by: str
    is_parallel: bool = False

    def rows(self) -> Iterator[Row]:
        """Yield the rows in file order."""
        first, *others = files = {path: read_lines(path) for path in self.columns.values()}
        for path in others:
            if len(files[path]) != len(files[first]):
                guess = describe_misalignment(first, files[first], path, files[path]) if self.is_parallel else ""
                raise InputError(
                    f"{first} has {len(files[first])} lines, but {path} has {len(files[path])}; "
                    f"{guess or 'expected one for each line of text'}"
                )
        yield from enumerate(zip(*(files[path] for path in self.columns.values()), strict=True), start=1)

    def location(self, number: int) -> str:
        """Return the location of a line, counted from 1."""
        return f"{self.columns[self.located_by]}:{number}"

    def identity(self) -> list[object]:
        """Return JSON values that identify the rows."""
        return ["files", {role: content_key(path) for role, path in self.columns.items()}]


@dataclass(frozen=True)
class DelimitedFile:
    """A source of columns in a file: separated by tabs, without quoting, or by commas, with quoting.

    Args:
        path: the file, plain or .gz.
        columns: the column of each role: its number, counted from 1, or its name in the first line. If a column is
            named, the first line is not a row. None means the first column that no other role has.
        separator: a tab or a comma.
        keys: the key of a run file that chooses the column of each role, for messages.
        is_distinct: True if two roles must have different columns.
    """

    path: Path
    columns: Mapping[str, Column | None]
    separator: str = "\t"
    keys: Mapping[str, str] = field(default_factory=dict, compare=False)
    is_distinct: bool = False

    def rows(self) -> Iterator[Row]:
        """Yield the rows in file order."""
        lines = self._lines()
        try:
            number, names = next(lines)
        except StopIteration:
            raise empty_file(self.path) from None
        positions = self._positions(number, names)
        if not any(isinstance(column, str) for column in self.columns.values()):
            lines = (line for group in ([(number, names)], lines) for line in group)
        for number, cells in lines:
            if len(cells) != len(names):
                raise self._column_count_error(number, cells, len(names))
            yield number, tuple(cells[position - 1] for position in positions)

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        if self.separator == "\t":
            for number, line in enumerate(stream_lines(self.path), start=1):
                yield number, line.split("\t")
            return
        # Cells may be as long as in a file of tabs.
        csv.field_size_limit(_LONGEST_CELL)
        lines: list[str] = []

        def record_lines() -> Iterator[str]:
            for line in stream_lines(self.path):
                lines.append(line)
                yield f"{line}\n"

        reader = csv.reader(record_lines(), strict=True)
        while True:
            number = reader.line_num + 1
            lines.clear()
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise self._quote_error(number, lines, str(error)) from None
            if row is None:
                return
            if any('"' in line for line in lines) and _CSV_ROW.fullmatch("\n".join(lines)) is None:
                raise self._quote_error(number, lines, "a quote inside a text that does not begin with a quote")
            if row:
                yield number, row

    def _quote_error(self, number: int, lines: Sequence[str], reason: str) -> InputError:
        """Return the error for a row with wrong quotes; it names the line and the column of the first wrong quote."""
        text = "\n".join(lines)
        right = _CSV_CELLS.match(text)
        end = right.end() if right else 0
        column = end - text.rfind("\n", 0, end)
        return InputError(
            f"{self.location(number + text.count(chr(10), 0, end))}: expected columns separated by commas, with texts "
            f'that hold one or a quote in "quotes", but at character {column}: {reason}; write a quote in such a text '
            "twice"
        )

    def _positions(self, number: int, names: Sequence[str]) -> list[int]:
        named = {role: self._position(role, column, names, number) for role, column in self.columns.items()}
        free = (position for position in range(1, len(named) + 2) if position not in named.values())
        positions = []
        for role, column in named.items():
            position = next(free) if column is None else column
            positions.append(position)
            if position > len(names):
                wanted = f"column {position}" if self.columns[role] else "further column for " + self._key(role)
                raise self._missing_column_error(number, names, "there is no " + wanted, role)
        if self.is_distinct and len(set(positions)) < len(positions):
            [(twice, _)] = Counter(positions).most_common(1)
            roles = [role for role, position in zip(named, positions, strict=True) if position == twice]
            raise InputError(
                f"{self.location(number)}: " + Message(" and ").join(map(self._key, roles)) + f" name the same column, "
                f"{twice}; the columns here are {_format_cells(names)}"
            )
        return positions

    def _position(self, role: str, column: Column | None, names: Sequence[str], number: int) -> int | None:
        if isinstance(column, str):
            if column not in names:
                raise self._missing_column_error(
                    number, names, f"there is no column '{column}'{did_you_mean(column, names)}", role
                )
            return names.index(column) + 1
        return column

    def _column_count_error(self, number: int, cells: Sequence[str], expected: int) -> InputError:
        """Return the error for a line with more or fewer columns than the first line."""
        name, mend = _SEPARATORS[self.separator]
        return InputError(
            f"{self.location(number)}: expected {expected} columns, separated by {name}, as in the first line, "
            f"got {len(cells)}: {_format_cells(cells)}; {mend if len(cells) > expected else 'add what is missing'}"
        )

    def _missing_column_error(self, number: int, cells: Sequence[str], fault: str, role: str) -> InputError:
        """Return the error for a missing column; it lists the columns of the first line."""
        parts = [
            f"{self.location(number)}: " + fault,
            f"its columns, separated by {_SEPARATORS[self.separator][0]}, are",
        ]
        parts[1] += f" {_format_cells(cells)}"
        if len(cells) == 1:
            hints = (hint for sign, hint in _OTHER_SEPARATORS.items() if sign in cells[0])
            parts.append(f"if the columns are separated by {next(hints, _OTHERWISE)}")
        else:
            parts.append("choose one with " + self._key(role) + ", by its name in the first line or its number from 1")
        return InputError(Message("; ").join(parts))

    def _key(self, role: str) -> str:
        return key(self.keys.get(role, role))

    def location(self, number: int) -> str:
        """Return the location of the row that begins in a line, counted from 1."""
        return f"{self.path}:{number}"

    def identity(self) -> list[object]:
        """Return JSON values that identify the rows."""
        return ["columns", self.separator, content_key(self.path), dict(self.columns)]


@dataclass(frozen=True)
class JsonLinesFile:
    """A source of JSON lines: a file with one JSON object per line.

    Args:
        path: the file, plain or .gz.
        columns: the field of each role; "a.b" is field "b" of field "a".
        raw: the roles whose values are not texts.
        keys: the key of a run file that chooses the field of each role, for messages.
    """

    path: Path
    columns: Mapping[str, str]
    raw: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict, compare=False)

    def rows(self) -> Iterator[Row]:
        """Yield the rows in file order."""
        number = 0
        for number, line in enumerate(stream_lines(self.path), start=1):
            if not line.strip():
                continue
            location = self.location(number)
            try:
                values = _values(json.loads(line), self, location)
            except InputError:
                raise
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"{location}: expected one JSON object in the line, but {_json_fault(error)}"
                ) from None
            yield number, values
        if not number:
            raise empty_file(self.path)

    def location(self, number: int) -> str:
        """Return the location of a line, counted from 1."""
        return f"{self.path}:{number}"

    def identity(self) -> list[object]:
        """Return JSON values that identify the rows."""
        return ["jsonl", content_key(self.path), dict(self.columns)]


@dataclass(frozen=True)
class Dataset:
    """A source of rows that the `datasets` library loads; class numbers are replaced by class names.

    Args:
        name: the name on the Hugging Face hub, a local folder, or a file with an ending of `TABLE_FORMATS`.
        split: the split to read, such as "train".
        columns: the field of each role; "a.b" is field "b" of field "a".
        config: the configuration of the data set. None means that it has only one.
        raw: the roles whose values are not texts.
        keys: the key of a run file that chooses the field of each role, for messages.
        revision: a branch, a tag or a commit of the hub. None means the newest.
    """

    name: str
    split: str
    columns: Mapping[str, str]
    config: str | None = None
    raw: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict, compare=False)
    revision: str | None = None

    def rows(self) -> Iterator[Row]:
        """Yield the rows in the order of the data set."""
        rows = self._load()
        features = getattr(rows, "features", None)
        classes = [_class_names(features, name) if role in self.raw else None for role, name in self.columns.items()]
        for number, record in enumerate(rows):
            location = self.location(number)
            values = _values(record, self, location)
            yield (
                number,
                tuple(
                    value if names is None else _class_name(value, names, location)
                    for value, names in zip(values, classes, strict=True)
                ),
            )

    def splits(self) -> list[str]:
        """Return the names of the splits of the data set.

        Raises:
            InputError: the library is not installed, or the data set cannot be found.
        """
        if has_ending(self.name, *TABLE_FORMATS):
            return ["train"]
        names: list[str] = self._call_library(
            lambda hub: hub.get_dataset_split_names(self.name, self.config, **self._at)
        )
        return names

    def _load(self) -> Any:
        if has_ending(self.name, *TABLE_FORMATS):
            file = str(user_path(self.name))
            kind, options = TABLE_FORMATS[Path(self.name.removesuffix(".gz")).suffix]
            return self._call_library(lambda hub: hub.load_dataset(kind, data_files=file, split=self.split, **options))
        return self._call_library(lambda hub: hub.load_dataset(self.name, self.config, split=self.split, **self._at))

    @property
    def _at(self) -> dict[str, str]:
        return {} if self.revision is None else {"revision": self.revision}

    def _call_library(self, call: Callable[[Any], Any]) -> Any:
        try:
            library = importlib.import_module("datasets")
        except ImportError:
            raise InputError(
                f"dataset '{self.name}' needs the datasets library; install it with: "
                f"{make_install_command(extra='datasets')}"
            ) from None
        library_error = getattr(getattr(library, "exceptions", None), "DatasetsError", OSError)
        try:
            return call(library)
        except (OSError, ValueError, LookupError, RuntimeError, library_error) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InputError(f"dataset '{self.name}', split '{self.split}', cannot be loaded: {reason}") from None

    def location(self, number: int) -> str:
        """Return the location of a row, counted from 0."""
        return f"{self.name}[{self.split}] row {number}"

    def identity(self) -> list[object]:
        """Return JSON values that identify the rows."""
        fingerprint = str(getattr(self._load(), "_fingerprint", ""))
        return ["dataset", self.name, self.config, self.revision, self.split, dict(self.columns), fingerprint]


@dataclass(frozen=True)
class Examples:
    """A source of examples in memory.

    Attributes:
        records: the fields of each example, as JSON values.
        columns: the field of each role.
        raw: the roles whose values are not texts.
        name: the name of the list in messages.
    """

    records: Sequence[Mapping[str, Any]]
    columns: Mapping[str, str]
    raw: tuple[str, ...]
    name: str
    keys: ClassVar[Mapping[str, str]] = MappingProxyType({})  # the task decides the fields; no key chooses them

    def rows(self) -> Iterator[Row]:
        """Yield the examples in order."""
        for number, record in enumerate(self.records, start=1):
            yield number, _values(record, self, self.location(number))

    def location(self, number: int) -> str:
        """Return the location of an example, counted from 1."""
        return f"{self.name}, example {number}"

    def identity(self) -> list[object]:
        """Return JSON values that identify the rows."""
        return ["examples", list(self.records), dict(self.columns)]


def whole_row_keys(table: DataTable) -> tuple[Keys, Labels]:
    """Return keys and labels for `draw_rows`: the whole row as its only key, so equal rows stay together; no labels."""
    return [[json.dumps(values, default=repr)] for values in zip(*table.columns.values(), strict=True)], None


def read_table(
    source: TableSource,
    share: Share = WHOLE,
    *,
    what: str,
    row_keys: Callable[[DataTable], tuple[Keys, Labels]] = whole_row_keys,
) -> DataTable:
    """Read the rows of a source, in order.

    Args:
        source: the source of the rows.
        share: the share of the rows to read. `WHOLE` means all rows. If a share s is held out, (0, 1 - s) are the
            training rows, and (1 - s, 1) are the rows held out.
        what: the noun for a row in messages.
        row_keys: a function that returns the texts and the labels of the rows, for `draw_rows`.

    Raises:
        InputError: a file, column or field is missing or wrong, files have unequal lengths, there is no row, or no
            row can be held out.
    """
    rows = list(source.rows())
    if not rows:
        raise InputError(f"{source.location(1)}: expected at least one {what}, found none")
    columns = {role: [values[position] for _, values in rows] for position, role in enumerate(source.columns)}
    table = DataTable(columns, [number for number, _ in rows], source.location)
    if share == WHOLE:
        return table
    held = set(_choose_held_out(*row_keys(table), share, what))
    if not held:
        raise InputError(
            f"{table.location(0)}: no {what} from here on can be held out for validation, since each is the only one "
            "or the only one of its label; give validation data separately"
        )
    return table.select([row for row in range(len(rows)) if (row in held) == (share[0] > 0.0)])


def _choose_held_out(keys: Keys, labels: Labels, share: Share, what: str) -> list[int]:
    """Return the rows to hold out for validation; warn if training reads rows that are equal to them."""
    size = 1.0 - (share[0] or share[1])
    # If groups of equal texts exceed the share, a larger share is better than equal texts on both sides.
    held = draw_rows(keys, size, labels) or draw_rows(keys, min(0.5, 2 * size), labels)
    if held:
        return held
    held = draw_rows([[row] for row in range(len(keys))], size, labels)
    if held and share[0]:
        message(
            f"validation reads {len(held):,} {what}s that training reads too, because too many are equal: scores are "
            "too good; give validation data separately"
        )
    return held


def _format_cells(cells: Sequence[str]) -> str:
    """Return the cells of a line as a text that numbers them, for messages."""
    shown = [f"{number} {json_text(cell)}" for number, cell in enumerate(cells[:_MOST_SHOWN], start=1)]
    return ", ".join(shown) + (f" and {len(cells) - _MOST_SHOWN} more" if len(cells) > _MOST_SHOWN else "")


def _json_fault(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"at character {error.colno}: {error.msg.lower()}"
    return "its values are nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


def _values(record: object, source: JsonLinesFile | Dataset | Examples, location: str) -> tuple[object, ...]:
    return tuple(_value(record, source, role, location) for role in source.columns)


def _value(record: object, source: JsonLinesFile | Dataset | Examples, role: str, location: str) -> object:
    name, chosen_by = source.columns[role], source.keys.get(role)
    advice = "" if chosen_by is None else "; choose one with " + key(chosen_by)
    value = field_value(record, name, location, advice)
    return value if role in source.raw else check_text(value, name, location)


def field_value(record: object, field: str, location: str, advice: str = "") -> object:
    """Return the value of a field in a JSON object; a name with dots, such as "a.b", is a path of nested fields.

    Args:
        record: a JSON value.
        field: the name of the field, or the path.
        location: the location of the record, for messages.
        advice: the end of the message if there is no such field.

    Raises:
        InputError: there is no such field.
    """
    names = [field] if isinstance(record, Mapping) and field in record else field.split(".")
    value = record
    for name in names:
        if not isinstance(value, Mapping):
            raise InputError(f"{location}: expected an object with the field '{name}', got {json_text(value)}")
        if name not in value:
            raise InputError(
                f"{location}: there is no field '{name}'; the fields are "
                f"{', '.join(map(repr, value)) or 'none'}{did_you_mean(name, map(str, value))}" + advice
            )
        value = value[name]
    return value


def check_text(value: object, field: str, location: str) -> str:
    """Check that the value of a field is a text, and return it.

    Args:
        value: the value of the field.
        field: the name of the field, for messages.
        location: the location of the record, for messages.

    Raises:
        InputError: the value is not a text.
    """
    if not isinstance(value, str):
        raise InputError(f"{location}: field '{field}' is {json_text(value)}; expected a text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{location}: field '{field}' holds a lone surrogate; expected Unicode text") from None
    return value


def _class_names(features: Any, field: str) -> list[str] | None:
    """Return the class names of a field of a data set, or of the items in its lists; None if it has no classes."""
    try:
        feature = features[field]
    except (KeyError, TypeError):
        return None
    names = getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)
    return None if names is None else list(names)


def _class_name(value: object, names: Sequence[str], location: str) -> object:
    if isinstance(value, list):
        return [_class_name(item, names, location) for item in value]
    if not isinstance(value, int):
        return value
    if not 0 <= value < len(names):
        raise InputError(
            f"{location}: class {value} has no name among the {len(names)} of the dataset; "
            "the labels of this split may be hidden: use another split"
        )
    return names[value]
