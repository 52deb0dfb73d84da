"""Pairs of texts: two aligned files, a TSV file, JSON lines, or a Hugging Face dataset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clearhead.data.sources.run_file_tables import Form, parse_form, user_path
from clearhead.data.sources.tables import (
    AlignedFiles,
    Column,
    Dataset,
    DelimitedFile,
    JsonLinesFile,
    Table,
    TableSource,
    read_table,
)

_COLUMNS = {"source": "source_column", "target": "target_column"}
_FIELDS = {"source": "source_field", "target": "target_field"}


def parallel_files(source: Path, target: Path) -> AlignedFiles:
    """Return the source of two files whose lines are translations of each other."""
    return AlignedFiles({"source": source, "target": target}, located_by="source", is_parallel=True)


def read_pairs(source: TableSource) -> Table:
    """Read all pairs of a source, as columns "source" and "target".

    Raises:
        InputError: a file, column or field is missing or unusable, or two files have unequal line counts.
    """
    return read_table(source, what="pair")


def same_sides(pairs: Table) -> str:
    """Return a warning where most pairs have the same text on both sides; else nothing."""
    same = sum(source == target != "" for source, target in zip(pairs["source"], pairs["target"], strict=True))
    return f"{same:,} of {len(pairs):,} pairs have the same text on both sides" if 2 * same > len(pairs) else ""


def _fields(table: Mapping[str, Any]) -> dict[str, str]:
    return {role: table.get(key, role) for role, key in _FIELDS.items()}


def _columns(table: Mapping[str, Any]) -> dict[str, Column | None]:
    return {role: table.get(key, number) for number, (role, key) in enumerate(_COLUMNS.items(), start=1)}


_FORMS: tuple[Form[TableSource], ...] = (
    Form("source", ("target",), (), lambda t: parallel_files(user_path(t["source"]), user_path(t["target"]))),
    Form("tsv", (), (*_COLUMNS.values(),), lambda t: DelimitedFile(user_path(t["tsv"]), _columns(t), keys=_COLUMNS)),
    Form(
        "jsonl",
        (),
        (*_FIELDS.values(),),
        lambda t: JsonLinesFile(user_path(t["jsonl"]), _fields(t), keys=_FIELDS),
    ),
    Form(
        "dataset",
        ("split",),
        (*_FIELDS.values(), "config"),
        lambda t: Dataset(t["dataset"], t["split"], _fields(t), t.get("config"), keys=_FIELDS),
    ),
)


def parse_pair_source(table: Mapping[str, Any]) -> TableSource:
    """Turn a table of a run file, such as { source = "a.de", target = "a.en" }, into a source.

    Args:
        table: the keys "source" and "target"; or "tsv"; or "jsonl"; or "dataset"; with the other keys of each form.

    Raises:
        InputError: every unknown or missing key and every wrong type, in one report.
    """
    return parse_form(table, _FORMS, expected="source and target; tsv; jsonl; or dataset", columns=_COLUMNS.values())
