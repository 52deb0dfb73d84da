"""Examples of a task: lists from Python, which are stored as JSON lines, and checked rows of a table."""

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
    """The format of a task's examples in a Python list.

    Attributes:
        columns: the allowed forms of an example, each with the field name of each role (such as "source"), in order.
            An example with one field is a text, not a tuple.
        raw: the roles whose values are not texts.
        as_source: a function that returns examples as a source of the task, like the sources of its files.
    """

    columns: tuple[Mapping[str, str], ...]
    raw: tuple[str, ...] = ()
    as_source: Callable[[Examples], Any] = lambda examples: examples

    def parse(self, examples: Any, *, name: str = "data") -> Examples:
        """Turn a list of examples into a source.

        Args:
            examples: a list of tuples with the values of each role; for one role a list of texts.
            name: the name of the list in messages.

        Raises:
            InputError: `examples` is not a list, or an example has another form.
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
    """Return the text of a JSON-lines file with the examples, one object per line."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in examples.records)


def json_lines_entry(examples: Examples, path: Path, form: type[Form]) -> dict[str, str]:
    """Return the [data] entry of a run file that reads examples from a file of JSON lines.

    Args:
        examples: the examples in the file.
        path: the file.
        form: the task's type of [data] table for a file; its first key holds the path.
    """
    if "source" in examples.columns:
        return {"jsonl": str(path)}
    marker, *keys = form.model_fields
    return {marker: str(path), **{role: field for role, field in examples.columns.items() if role in keys}}


def _size(values: object) -> int | None:
    """Return the number of values in a Python example; None if the example is not a sequence of values."""
    return len(values) if isinstance(values, Sequence) and not isinstance(values, str) else None


@dataclass(frozen=True)
class CheckedRows(ABC):
    """A source whose rows are checked by a task; each task has a subclass.

    Attributes:
        table: the table; it has the columns that `check` reads.
        kind: the kind of the data, which is part of the identity.
        columns: the roles of the values that `check` returns.
    """

    table: JsonLinesFile | Examples
    kind: ClassVar[str]
    columns: ClassVar[tuple[str, ...]]

    @abstractmethod
    def check(self, record: Mapping[str, Any], location: str) -> tuple[Any, ...]:
        """Check a row and return its values; an empty tuple leaves the row out.

        Raises:
            InputError: a value is not of the form that the task expects.
        """

    def rows(self) -> Iterator[Row]:
        """Yield the checked rows in order."""
        for number, values in self.table.rows():
            checked = self.check(dict(zip(self.table.columns, values, strict=True)), self.table.location(number))
            if checked:
                yield number, checked

    def location(self, number: int) -> str:
        """Return the location of a row, for messages."""
        return self.table.location(number)

    def identity(self) -> list[object]:
        """Return JSON values that identify the rows."""
        return [self.kind, *self.table.identity()]
