"""Examples that a task checks: lists from Python, which are stored as JSON lines, and rows of a table."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from clearhead.base.errors import InputError
from clearhead.data.sources.run_file_tables import Form
from clearhead.data.sources.tables import Examples, JsonLinesFile, Row


@dataclass(frozen=True)
class ListedExamples:
    """The examples of a task in a list.

    Attributes:
        columns: for each form of an example the fields of its values, by role and in order; a text alone has no tuple
            around it.
        raw: the roles whose values are not texts.
        as_source: returns examples as a source of the task, like those of its files.
    """

    columns: tuple[Mapping[str, str], ...]
    raw: tuple[str, ...] = ()
    as_source: Callable[[Examples], Any] = lambda examples: examples

    def parse(self, examples: Any, *, name: str = "data") -> Examples:
        """Turn a list of examples into a source.

        Args:
            examples: tuples of the values of each role; texts, where there is one role.
            name: what a message calls the list.

        Raises:
            InputError: not a list, or an example of another form.
        """
        if isinstance(examples, str) or not isinstance(examples, Sequence):
            raise InputError(f"{name}: expected a list of examples, got {type(examples).__name__}")
        size = _size(examples[0]) if examples else None
        columns = next((form for form in self.columns if len(form) == size), self.columns[0])
        fields = [*columns.values()]
        records = []
        for number, example in enumerate(examples, start=1):
            values = (example,) if len(fields) == 1 else example
            if _size(values) != len(fields):
                raise InputError(f"{name}, example {number}: expected ({', '.join(fields)}), got {example!r:.80}")
            try:
                records.append(json.loads(json.dumps(dict(zip(fields, values, strict=True)))))
            except (TypeError, ValueError, RecursionError):
                raise InputError(f"{name}, example {number}: expected texts, got {example!r:.80}") from None
        return Examples(records, columns, self.raw, name)


def json_lines(examples: Examples) -> str:
    """Return the records of examples as JSON lines."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in examples.records)


def json_lines_entry(examples: Examples, path: Path, form: type[Form]) -> dict[str, str]:
    """Return the entry of [data] in a run file that reads examples from a file of their JSON lines.

    Args:
        examples: of the file.
        path: of the file.
        form: in which a file of a task is named, by the first of its keys.
    """
    if "source" in examples.columns:
        return {"jsonl": str(path)}
    marker, *keys = form.model_fields
    return {marker: str(path), **{role: field for role, field in examples.columns.items() if role in keys}}


def _size(values: object) -> int | None:
    """Return the number of values of an example; None: it is not a sequence of values."""
    return len(values) if isinstance(values, Sequence) and not isinstance(values, str) else None


@dataclass(frozen=True)
class CheckedRows(ABC):
    """The rows of a table, each checked by a task, which has a subclass.

    Args:
        table: its columns are those that `check` reads.

    Attributes:
        kind: of the data, for the identity.
        columns: the roles of the values that `check` returns.
    """

    table: JsonLinesFile | Examples
    kind: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]

    @abstractmethod
    def check(self, record: Mapping[str, Any], location: str) -> tuple[Any, ...]:
        """Return the values of a row; none of a row that is left out.

        Raises:
            InputError: a value is not as the task expects it.
        """

    def rows(self) -> Iterator[Row]:
        """Go through the rows in order."""
        for number, values in self.table.rows():
            checked = self.check(dict(zip(self.table.columns, values, strict=True)), self.table.location(number))
            if checked:
                yield number, checked

    def location(self, number: int) -> str:
        """Return the place of a row."""
        return self.table.location(number)

    def identity(self) -> list[object]:
        """Return JSON values that the rows depend on."""
        return [self.kind, *self.table.identity()]
