"""Pairs of texts: two aligned files, a TSV file, JSON lines, or a Hugging Face dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import Field

from clearhead.data.sources.run_file_tables import Column, Filled, Form, user_path
from clearhead.data.sources.tables import (
    AlignedFiles,
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


class FilePair(Form):
    """Two files, line by line."""

    source: Filled = Field(examples=["train.de"])
    target: Filled = Field(examples=["train.en"])

    def as_source(self) -> TableSource:
        """Return the source of the two files."""
        return parallel_files(user_path(self.source), user_path(self.target))


class PairTable(Form):
    """One file of tab-separated columns."""

    tsv: Filled = Field(examples=["train.tsv"])
    source_column: Column = 1
    target_column: Column = 2

    def as_source(self) -> TableSource:
        """Return the source of the two columns."""
        columns = {"source": self.source_column, "target": self.target_column}
        return DelimitedFile(user_path(self.tsv), columns, keys=_COLUMNS)


class PairLines(Form):
    """One JSON object per line."""

    jsonl: Filled = Field(examples=["train.jsonl"])
    source_field: Filled = "source"
    target_field: Filled = "target"

    def as_source(self) -> TableSource:
        """Return the source of the two fields."""
        fields = {"source": self.source_field, "target": self.target_field}
        return JsonLinesFile(user_path(self.jsonl), fields, keys=_FIELDS)


class PairDataset(Form):
    """A Hugging Face dataset by name, or a Parquet file."""

    dataset: Filled = Field(examples=["name"])
    split: Filled = Field(examples=["train"])
    config: Filled | None = None
    revision: Filled | None = None
    source_field: Filled | None = None
    target_field: Filled | None = None

    def as_source(self) -> TableSource:
        """Return the source of the two fields of the dataset."""
        fields = {"source": self.source_field or "source", "target": self.target_field or "target"}
        return Dataset(self.dataset, self.split, fields, self.config, keys=_FIELDS, revision=self.revision)


PAIR_FORMS: Final[tuple[type[Form], ...]] = (FilePair, PairTable, PairLines, PairDataset)
