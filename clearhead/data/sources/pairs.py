"""Where pairs of texts come from: two aligned files, a TSV file, JSON lines, or a Hugging Face data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.data.sources.lines import read_lines
from clearhead.data.sources.misalignment import first_misaligned
from clearhead.data.sources.records import (
    Form,
    column_position,
    content,
    load_named,
    parse_form,
    parse_record,
    path_of,
    shown,
    text_field,
)
from clearhead.errors import InputError

Pair = tuple[str, str]


@dataclass(frozen=True)
class FilePair:
    """Two files whose lines belong together one to one.

    Args:
        source: the file of the source side, plain or .gz.
        target: the file of the target side, plain or .gz.
    """

    source: Path
    target: Path

    def read(self) -> list[Pair]:
        """Return the pairs in file order."""
        source, target = read_lines(self.source), read_lines(self.target)
        if len(source) != len(target):
            raise InputError(_unequal(self.source, source, self.target, target))
        return list(zip(source, target, strict=True))

    def place(self, index: int) -> str:
        """Return where pair number `index`, counted from 0, stands."""
        return f"{self.source}:{index + 1}"

    def identity(self) -> list[str]:
        """Return what the pairs depend on."""
        return ["files", content(self.source), content(self.target)]


@dataclass(frozen=True)
class TsvPairs:
    """One file with a pair in each line, columns separated by tabs; quotes have no meaning.

    Args:
        path: the file, plain or .gz.
        source_column: a column counted from 0, or its name in the first line; both columns are given the same way.
        target_column: the column of the target side.
    """

    path: Path
    source_column: int | str = 0
    target_column: int | str = 1

    def read(self) -> list[Pair]:
        """Return the pairs in file order; a first line that names the columns is not a pair."""
        rows = [line.split("\t") for line in read_lines(self.path)]
        columns = (self.source_column, self.target_column)
        source, target = (column_position(column, rows[0], f"{self.path}:1") for column in columns)
        needed = max(source, target) + 1
        header = self._num_header_lines
        for number, row in enumerate(rows[header:], start=header + 1):
            if len(row) < needed:
                raise InputError(
                    f"{self.path}:{number}: expected at least {needed} columns separated by tabs, received {len(row)}"
                )
        return [(row[source], row[target]) for row in rows[header:]]

    @property
    def _num_header_lines(self) -> int:
        return int(isinstance(self.source_column, str) or isinstance(self.target_column, str))

    def place(self, index: int) -> str:
        """Return where pair number `index`, counted from 0, stands."""
        return f"{self.path}:{index + 1 + self._num_header_lines}"

    def identity(self) -> list[str]:
        """Return what the pairs depend on."""
        columns = [repr(self.source_column), repr(self.target_column)]
        return ["tsv", content(self.path), *columns]


@dataclass(frozen=True)
class JsonLinesPairs:
    """One file with a JSON object in each line.

    Args:
        path: the file, plain or .gz.
        source_field: the field of the source text; "translation.de" is field "de" of field "translation".
        target_field: the field of the target text.
    """

    path: Path
    source_field: str
    target_field: str

    def read(self) -> list[Pair]:
        """Return the pairs in file order."""
        return [self._pair(line, self.place(index)) for index, line in enumerate(read_lines(self.path))]

    def _pair(self, line: str, place: str) -> Pair:
        record = parse_record(line, place)
        return text_field(record, self.source_field, place), text_field(record, self.target_field, place)

    def place(self, index: int) -> str:
        """Return where pair number `index`, counted from 0, stands."""
        return f"{self.path}:{index + 1}"

    def identity(self) -> list[str]:
        """Return what the pairs depend on."""
        return ["jsonl", content(self.path), self.source_field, self.target_field]


@dataclass(frozen=True)
class DatasetPairs:
    """A data set that the `datasets` library loads by name.

    Args:
        name: the name on the Hugging Face hub, or a local folder.
        split: the part to read, such as "train".
        source_field: the field of the source text; "translation.de" is field "de" of field "translation".
        target_field: the field of the target text.
        config: which configuration of the data set, where it has several.
    """

    name: str
    split: str
    source_field: str
    target_field: str
    config: str | None = None

    def read(self) -> list[Pair]:
        """Return the pairs in the order of the data set."""
        rows = enumerate(self._load())
        return [
            (text_field(row, self.source_field, place), text_field(row, self.target_field, place))
            for place, row in ((self.place(index), row) for index, row in rows)
        ]

    def _load(self) -> Any:
        return load_named(self.name, self.config, self.split)

    def place(self, index: int) -> str:
        """Return where pair number `index`, counted from 0, stands."""
        return f"{self.name}[{self.split}] row {index}"

    def identity(self) -> list[str]:
        """Return what the pairs depend on."""
        fingerprint = str(getattr(self._load(), "_fingerprint", ""))
        return ["dataset", self.name, str(self.config), self.split, self.source_field, self.target_field, fingerprint]


PairSource = FilePair | TsvPairs | JsonLinesPairs | DatasetPairs


def read_pairs(source: PairSource) -> list[Pair]:
    """Return all pairs of a source, in order, as they stand there.

    Raises:
        InputError: a file, column or field is missing or unusable, or two files have unequal line counts.
    """
    pairs = source.read()
    if not pairs:
        raise InputError(f"{source.place(0)}: expected at least one pair, found none")
    return pairs


_COLUMNS = ("source_column", "target_column")
_FIELDS = ("source_field", "target_field")


def _make_files(table: Mapping[str, Any]) -> FilePair:
    return FilePair(source=path_of(table["source"]), target=path_of(table["target"]))


def _make_tsv(table: Mapping[str, Any]) -> TsvPairs:
    return TsvPairs(path_of(table["tsv"]), **{key: table[key] for key in _COLUMNS if key in table})


def _make_json_lines(table: Mapping[str, Any]) -> JsonLinesPairs:
    return JsonLinesPairs(path_of(table["jsonl"]), table["source_field"], table["target_field"])


def _make_dataset(table: Mapping[str, Any]) -> DatasetPairs:
    return DatasetPairs(
        name=table["dataset"],
        split=table["split"],
        source_field=table.get("source_field", "source"),
        target_field=table.get("target_field", "target"),
        config=table.get("config"),
    )


_FORMS: tuple[Form[PairSource], ...] = (
    Form("source", ("target",), (), _make_files),
    Form("tsv", (), _COLUMNS, _make_tsv),
    Form("jsonl", _FIELDS, (), _make_json_lines),
    Form("dataset", ("split",), (*_FIELDS, "config"), _make_dataset),
)


def parse_pair_source(table: Mapping[str, Any]) -> PairSource:
    """Turn a table of a run file, such as { source = "a.de", target = "a.en" }, into a source.

    Args:
        table: the keys "source" and "target"; or "tsv"; or "jsonl"; or "dataset"; with what belongs to each.

    Raises:
        InputError: every unknown or missing key and every wrong type, in one report.
    """
    return parse_form(table, _FORMS, expected="source and target; tsv; jsonl; or dataset", value_faults=_value_faults)


def _value_faults(key: str, value: object) -> list[str]:
    if key in _COLUMNS and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return []
    if isinstance(value, str) and value:
        return []
    expected = "a column number from 0 or a column name" if key in _COLUMNS else "a text that is not empty"
    return [f"'{key}' is {value!r}; expected {expected}"]


def _unequal(source_path: Path, source: Sequence[str], target_path: Path, target: Sequence[str]) -> str:
    """Say how many lines each file has and which line looks like the first one without its partner."""
    counts = f"{source_path} has {len(source)} lines, but {target_path} has {len(target)}"
    source_is_longer = len(source) > len(target)
    longer, shorter = (source, target) if source_is_longer else (target, source)
    path = source_path if source_is_longer else target_path
    line = first_misaligned(longer, shorter)
    if line > len(shorter):
        return f"{counts}; {path}:{line} and what follows has no partner, or the other file was cut short"
    return (
        f"{counts}; by the lengths of the lines the first that looks wrong is {path}:{line} "
        f"({shown(longer[line - 1])} beside {shown(shorter[line - 1])})"
    )
