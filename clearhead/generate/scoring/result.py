"""The results of a validation and of an evaluation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from clearhead.base.printing import block


@dataclass(frozen=True)
class Validation:
    """Loss and score on held-out data.

    Attributes:
        loss: mean loss per label, in nats.
        score: a number where higher is better, or None.
    """

    loss: float
    score: float | None = None


@dataclass(frozen=True, repr=False, eq=False)
class Measures(Mapping[str, Any]):
    """What an evaluation measured: numbers by their names, as in the JSON of `clearhead evaluate`; printed as a table.

    A field that is None was not measured, or is not a finite number.
    """

    def record(self) -> dict[str, Any]:
        """Return JSON values by the names of the numbers."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @abstractmethod
    def lines(self) -> Sequence[str]:
        """Return the numbers for a person."""

    def __getitem__(self, name: str) -> Any:
        return self.record()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.record())

    def __len__(self) -> int:
        return len(self.record())

    def __repr__(self) -> str:
        return block(self.lines())


def align_columns(rows: Mapping[str, str]) -> list[str]:
    """Return names and values as the lines of a table of two columns."""
    width = max(map(len, rows))
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]


def percent(share: float) -> str:
    """Return a share as "97.50 %"."""
    return f"{100 * share:.2f} %"


def f1_table(title: str, rows: Mapping[str, Mapping[str, float | int | None]], counted: str) -> list[str]:
    """Return precision, recall, F1 and count of each row as the lines of a table.

    Args:
        title: of the first column.
        rows: the values of `F1Counts.record` by name.
        counted: the title of the last column.
    """
    width = max(len(title), *map(len, rows))
    lines = [f"{title:<{width}}  precision  recall      F1   {counted}"]
    for name, row in rows.items():
        shares = (row["precision"], row["recall"], row["f1"])
        columns = ("-" if share is None else f"{100 * share:.2f}" for share in shares)
        lines.append("{:<{}}  {:>9}  {:>6}  {:>6}  {:>6}".format(name, width, *columns, row["count"]))
    return lines
