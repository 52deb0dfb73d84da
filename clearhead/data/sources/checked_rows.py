"""Rows of a table that are more than texts: a task checks them and puts their values together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from clearhead.data.sources.tables import Examples, JsonLinesFile, Row


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
    def check(self, record: Mapping[str, Any], place: str) -> tuple[Any, ...]:
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
