"""Texts with labels: a table, JSON lines, aligned files, or a Hugging Face dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clearhead.data.sources.run_file_tables import has_ending
from clearhead.data.sources.tables import (
    WHOLE,
    AlignedFiles,
    Share,
    Table,
    TableSource,
    read_table,
)
from clearhead.errors import InputError
from clearhead.files import absent


def is_delimited(path: Path | str) -> bool:
    """Tell whether a file has columns, which may be given by their numbers."""
    return has_ending(path, ".tsv", ".csv")


def read_labelled(source: TableSource, share: Share = WHOLE) -> Table:
    """Read the examples of a source, as columns "text", "labels" and, for pairs of texts, "pair".

    Args:
        source: where they are.
        share: from which to which share of them, 0 to 1.

    Raises:
        InputError: a file, column or field is missing or unusable, or files have unequal line counts.
    """
    if isinstance(source, AlignedFiles) and not (labels := source.columns["labels"]).exists():
        raise InputError(
            f"{labels}: {absent(labels)}; expected a file with a label for each line of {source.columns['text']}, or a "
            "column where the name of that file ends in .tsv, .csv or .jsonl"
        )
    return read_table(source, share, what="labelled text")


def text_columns(data: Table) -> list[list[str]]:
    """Return the texts of labelled data, or the first and the second texts of pairs."""
    return [list(data[role]) for role in ("text", "pair") if role in data]


def labelled_texts(source: TableSource, share: Share = WHOLE) -> list[str]:
    """Return the texts of a source without their labels, those of pairs one by one, to train a tokenizer on."""
    return [text for column in text_columns(read_labelled(source, share)) for text in column]


def labelled_table(text: Path, labels: str | None, *, text_column: str | None, pair: str | None) -> dict[str, Any]:
    """Return the [data] table of labelled texts that are named on the command line.

    Args:
        text: the file of the texts.
        labels: the column of their labels, or a file of them; None: that of the training data.
        text_column: the column of the texts.
        pair: the column of the second texts, or a file of them.
    """
    values = {"labels": labels, "text_column": text_column, "pair": pair}
    given = {key: value for key, value in values.items() if value is not None}
    # As in a run file, a column of a table is a name or a number counted from 1.
    columns = {key: int(value) if is_delimited(text) and value.isdecimal() else value for key, value in given.items()}
    return {"text": str(text), **columns}
