"""How the command line names labelled texts: the same forms as in a run file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TABLES = (".tsv", ".csv")


def is_table(text: Path) -> bool:
    """Tell whether a file is one of columns, which can be named by their number."""
    return text.name.removesuffix(".gz").endswith(TABLES)


def labelled_table(text: Path, labels: str, *, text_column: str | None, pair: str | None) -> dict[str, Any]:
    """Return the [data] table of a run file that means the same.

    Args:
        text: the file of the texts.
        labels: the column of their labels, or a file of them.
        text_column: the column of the texts.
        pair: the column of the second texts, or a file of them.
    """
    values = {"labels": labels, "text_column": text_column, "pair": pair}
    given = {key: value for key, value in values.items() if value is not None}
    # A column of a table is a name or, as in a run file, a number counted from 0.
    columns = {key: int(value) if is_table(text) and value.isdecimal() else value for key, value in given.items()}
    return {"text": str(text), **columns}
