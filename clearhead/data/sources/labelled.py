"""Texts with labels: a table, JSON lines, aligned files, or a Hugging Face dataset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clearhead.data.sources.run_file_tables import Form, has_ending, parse_form, user_path
from clearhead.data.sources.tables import (
    WHOLE,
    AlignedFiles,
    Column,
    Dataset,
    DelimitedFile,
    JsonLinesFile,
    Share,
    Table,
    TableSource,
    read_table,
)
from clearhead.errors import InputError, key
from clearhead.files import absent

_RAW = ("labels",)
_KEYS = {"text": "text_column", "labels": "labels", "pair": "pair"}


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


def parse_labelled_source(table: Mapping[str, Any]) -> TableSource:
    """Turn a table of a run file, such as { text = "t.tsv", labels = "label" }, into a source.

    Args:
        table: "text" and "labels", with "text_column" and "pair" if the text's file is a table or JSON lines; or
            "dataset" and "labels", with "split", "field", "pair" and "config".

    Raises:
        InputError: every unknown or missing key and every wrong type, in one report.
    """
    name = str(table.get("text", ""))
    if "text" in table and "text_column" in table and not has_ending(name, ".tsv", ".csv", ".jsonl"):
        raise InputError(
            key("text_column") + f" is for a table, but the text is '{name}'; "
            "expected a name that ends in .tsv, .csv or .jsonl"
        )
    columns = ("labels", "text_column", "pair") if is_delimited(name) else ()
    return parse_form(table, _FORMS, expected="text and labels; or dataset and labels", columns=columns)


def _text_source(table: Mapping[str, Any]) -> TableSource:
    path, labels = user_path(table["text"]), table["labels"]
    pair = {"pair": table["pair"]} if "pair" in table else {}
    if is_delimited(path):
        default = "text" if isinstance(labels, str) else None
        columns: dict[str, Column | None] = {"labels": labels, **pair, "text": table.get("text_column", default)}
        separator = "\t" if has_ending(path, ".tsv") else ","
        return DelimitedFile(path, columns, separator, _KEYS, is_distinct=True)
    if has_ending(path, ".jsonl"):
        fields = {"text": table.get("text_column", "text"), "labels": labels, **pair}
        return JsonLinesFile(path, fields, _RAW, _KEYS)
    paths = {role: user_path(name) for role, name in {"labels": labels, **pair}.items()}
    return AlignedFiles({"text": path, **paths}, located_by="labels")


def _dataset(table: Mapping[str, Any]) -> TableSource:
    pair = {"pair": table["pair"]} if "pair" in table else {}
    fields = {"text": table.get("field", "text"), "labels": table["labels"], **pair}
    return Dataset(
        table["dataset"], table.get("split", "train"), fields, table.get("config"), _RAW, _KEYS | {"text": "field"}
    )


_FORMS: tuple[Form[TableSource], ...] = (
    Form("text", ("labels",), ("text_column", "pair"), _text_source),
    Form("dataset", ("labels",), ("split", "field", "pair", "config"), _dataset),
)
