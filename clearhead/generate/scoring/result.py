"""Result types: loss and score of a validation, and metrics of an evaluation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from clearhead.base.printing import block


@dataclass(frozen=True)
class Validation:
    """Loss and score on the validation set.

    Attributes:
        loss: mean loss per label, in nats.
        score: a number for which higher is better. None means no score.
    """

    loss: float
    score: float | None = None


@dataclass(frozen=True, repr=False, eq=False)
class Measures(Mapping[str, Any]):
    """Metrics of an evaluation by name, as in the JSON of `clearhead evaluate`; printed as a table.

    A metric that is None was not measured, or is not a finite number.
    """

    def record(self) -> dict[str, Any]:
        """Return the metrics as JSON values by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @abstractmethod
    def lines(self) -> Sequence[str]:
        """Return the lines of the table for display."""

    def __getitem__(self, name: str) -> Any:
        return self.record()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.record())

    def __len__(self) -> int:
        return len(self.record())

    def __repr__(self) -> str:
        return block(self.lines())


def align_columns(rows: Mapping[str, str]) -> list[str]:
    """Return names and values as the lines of a table with two columns."""
    width = max(map(len, rows))
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]


def percent(share: float) -> str:
    """Return a share as a percentage, such as "97.50 %"."""
    return f"{100 * share:.2f} %"


def f1_table(title: str, rows: Mapping[str, Mapping[str, float | int | None]], counted: str) -> list[str]:
    """Return a table with the columns precision, recall, F1 and count, as lines of text.

    Args:
        title: title of the first column.
        rows: values of `F1Counts.record`, by the name of the row.
        counted: title of the last column.
    """
    width = max(len(title), *map(len, rows))
    lines = [f"{title:<{width}}  precision  recall      F1   {counted}"]
    for name, row in rows.items():
        shares = (row["precision"], row["recall"], row["f1"])
        columns = ("-" if share is None else f"{100 * share:.2f}" for share in shares)
        lines.append("{:<{}}  {:>9}  {:>6}  {:>6}  {:>6}".format(name, width, *columns, row["count"]))
    return lines
