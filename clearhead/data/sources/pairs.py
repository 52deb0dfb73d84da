"""Pairs of texts: two aligned files, a TSV file, JSON lines, or a Hugging Face dataset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clearhead.data.sources.run_file_tables import Form, parse_form, user_path
from clearhead.data.sources.tables import (
    AlignedFiles,
    Dataset,
    DelimitedFile,
    JsonLinesFile,
    Table,
    TableSource,
    read_table,
)

_COLUMNS = ("source_column", "target_column")
_FIELDS = ("source_field", "target_field")


def parallel_files(source: Path, target: Path) -> AlignedFiles:
    """Return the source of two files whose lines are translations of each other."""
    return AlignedFiles({"source": source, "target": target}, located_by="source", is_parallel=True)


def read_pairs(source: TableSource) -> Table:
    """Read all pairs of a source, as columns "source" and "target".

    Raises:
        InputError: a file, column or field is missing or unusable, or two files have unequal line counts.
    """
    return read_table(source, what="pair")


def _fields(table: Mapping[str, Any]) -> dict[str, str]:
    return {role: table.get(key, role) for role, key in zip(("source", "target"), _FIELDS, strict=True)}


_FORMS: tuple[Form[TableSource], ...] = (
    Form("source", ("target",), (), lambda t: parallel_files(user_path(t["source"]), user_path(t["target"]))),
    Form(
        "tsv",
        (),
        _COLUMNS,
        lambda t: DelimitedFile(
            user_path(t["tsv"]), {"source": t.get("source_column", 0), "target": t.get("target_column", 1)}
        ),
    ),
    Form("jsonl", _FIELDS, (), lambda t: JsonLinesFile(user_path(t["jsonl"]), _fields(t))),
    Form(
        "dataset",
        ("split",),
        (*_FIELDS, "config"),
        lambda t: Dataset(t["dataset"], t["split"], _fields(t), t.get("config")),
    ),
)


def parse_pair_source(table: Mapping[str, Any]) -> TableSource:
    """Turn a table of a run file, such as { source = "a.de", target = "a.en" }, into a source.

    Args:
        table: the keys "source" and "target"; or "tsv"; or "jsonl"; or "dataset"; with the other keys of each form.

    Raises:
        InputError: every unknown or missing key and every wrong type, in one report.
    """
    return parse_form(table, _FORMS, expected="source and target; tsv; jsonl; or dataset", columns=_COLUMNS)
