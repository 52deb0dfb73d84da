"""Pairs of texts: two aligned files, a TSV file, JSON lines, or a Hugging Face dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import Field

from clearhead.data.sources.run_file_tables import Column, Filled, Form, user_path
from clearhead.data.sources.tables import (
    WHOLE,
    AlignedFiles,
    Dataset,
    DataTable,
    DelimitedFile,
    JsonLinesFile,
    Share,
    TableSource,
    read_table,
)

_COLUMNS = {"source": "source_column", "target": "target_column"}
_FIELDS = {"source": "source_field", "target": "target_field"}


def parallel_files(source: Path, target: Path) -> AlignedFiles:
    """Return the source of two files whose lines are translations of each other."""
    return AlignedFiles({"source": source, "target": target}, located_by="source", is_parallel=True)


def read_pairs(source: TableSource, share: Share = WHOLE) -> DataTable:
    """Read the pairs of a source, as columns "source" and "target".

    Args:
        source: the source of the pairs.
        share: the share of them to read, as for `read_table`.

    Raises:
        InputError: a file, column or field is missing or unusable, or two files have unequal line counts.
    """
    return read_table(source, share, what="pair", row_keys=lambda pairs: (pair_keys(pairs), None))


def pair_keys(pairs: DataTable) -> list[list[tuple[str, str]]]:
    """Return both sides of each pair, so that pairs with one side in common belong together; none of an empty pair."""
    sides = zip(pairs["source"], pairs["target"], strict=True)
    return [
        [("source", source.strip()), ("target", target.strip())] if source.strip() and target.strip() else []
        for source, target in sides
    ]


def equal_sides_warning(pairs: DataTable) -> str:
    """Return a warning where most pairs have the same text on both sides; else nothing."""
    same = sum(source == target != "" for source, target in zip(pairs["source"], pairs["target"], strict=True))
    return f"{same:,} of {len(pairs):,} pairs have the same text on both sides" if 2 * same > len(pairs) else ""


class FilePair(Form):
    """Two files, line by line."""

    #: A file with a text in each line.
    source: Filled = Field(examples=["train.de"])
    #: A file with what belongs to it, line by line.
    target: Filled = Field(examples=["train.en"])

    def as_source(self) -> TableSource:
        """Return the source of the two files."""
        return parallel_files(user_path(self.source), user_path(self.target))


class PairTable(Form):
    """One file of tab-separated columns."""

    #: A file of columns with tabs between them.
    tsv: Filled = Field(examples=["train.tsv"])
    #: The column of the sources.
    source_column: Column = 1
    #: The column of the targets.
    target_column: Column = 2

    def as_source(self) -> TableSource:
        """Return the source of the two columns."""
        columns = {"source": self.source_column, "target": self.target_column}
        return DelimitedFile(user_path(self.tsv), columns, keys=_COLUMNS)


class PairLines(Form):
    """One JSON object per line."""

    #: A file with a JSON object in each line.
    jsonl: Filled = Field(examples=["train.jsonl"])
    #: The field of the sources.
    source_field: Filled = "source"
    #: The field of the targets.
    target_field: Filled = "target"

    def as_source(self) -> TableSource:
        """Return the source of the two fields."""
        fields = {"source": self.source_field, "target": self.target_field}
        return JsonLinesFile(user_path(self.jsonl), fields, keys=_FIELDS)


class PairDataset(Form):
    """A Hugging Face dataset by name, or a Parquet file."""

    #: Its name on the hub, a folder, or a Parquet file.
    dataset: Filled = Field(examples=["name"])
    #: The part of it.
    split: Filled = Field(examples=["train"])
    #: Its configuration, where it has several.
    config: Filled | None = None
    #: A branch, a tag or a commit of the hub; without it the newest.
    revision: Filled | None = None
    #: The field of the sources; without it source.
    source_field: Filled | None = None
    #: The field of the targets; without it target.
    target_field: Filled | None = None

    def as_source(self) -> TableSource:
        """Return the source of the two fields of the dataset."""
        fields = {"source": self.source_field or "source", "target": self.target_field or "target"}
        return Dataset(self.dataset, self.split, fields, self.config, keys=_FIELDS, revision=self.revision)


PAIR_FORMS: Final[tuple[type[Form], ...]] = (FilePair, PairTable, PairLines, PairDataset)
