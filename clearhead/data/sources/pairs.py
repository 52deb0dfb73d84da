"""Sources of text pairs: two aligned files, a TSV file, JSON lines, or a Hugging Face data set."""

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
    """Return a source of two aligned files: their lines are translations of each other."""
    return AlignedFiles({"source": source, "target": target}, located_by="source", is_parallel=True)


def read_pairs(source: TableSource, share: Share = WHOLE) -> DataTable:
    """Read the pairs of a source into the columns "source" and "target".

    Args:
        source: the source of the pairs.
        share: the share of the pairs to read, as in `read_table`.

    Raises:
        InputError: a file, column or field is missing or unusable, or two files have unequal line counts.
    """
    return read_table(source, share, what="pair", row_keys=lambda pairs: (pair_keys(pairs), None))


def pair_keys(pairs: DataTable) -> list[list[tuple[str, str]]]:
    """Return both texts of each pair as keys that group pairs with a common text; none if a text is empty."""
    sides = zip(pairs["source"], pairs["target"], strict=True)
    return [
        [("source", source.strip()), ("target", target.strip())] if source.strip() and target.strip() else []
        for source, target in sides
    ]


def equal_sides_warning(pairs: DataTable) -> str:
    """Return a warning if most pairs have the same text on both sides, else an empty string."""
    same = sum(source == target != "" for source, target in zip(pairs["source"], pairs["target"], strict=True))
    return f"{same:,} of {len(pairs):,} pairs have the same text on both sides" if 2 * same > len(pairs) else ""


class FilePair(Form):
    """The [data] keys for pairs in two aligned files: line n of one translates line n of the other."""

    #: A file with a text in each line.
    source: Filled = Field(examples=["train.de"])
    #: A file with the target of each line of `source`.
    target: Filled = Field(examples=["train.en"])

    def as_source(self) -> TableSource:
        """Return the source that reads pairs from the two files."""
        return parallel_files(user_path(self.source), user_path(self.target))


class PairTable(Form):
    """The [data] keys for pairs in a file of tab-separated columns."""

    #: A file of tab-separated columns.
    tsv: Filled = Field(examples=["train.tsv"])
    #: The column of the sources.
    source_column: Column = 1
    #: The column of the targets.
    target_column: Column = 2

    def as_source(self) -> TableSource:
        """Return the source that reads pairs from the two columns."""
        columns = {"source": self.source_column, "target": self.target_column}
        return DelimitedFile(user_path(self.tsv), columns, keys=_COLUMNS)


class PairLines(Form):
    """The [data] keys for pairs in a file with one JSON object per line."""

    #: A file with one JSON object per line.
    jsonl: Filled = Field(examples=["train.jsonl"])
    #: The field of the sources.
    source_field: Filled = "source"
    #: The field of the targets.
    target_field: Filled = "target"

    def as_source(self) -> TableSource:
        """Return the source that reads pairs from two fields of each JSON object."""
        fields = {"source": self.source_field, "target": self.target_field}
        return JsonLinesFile(user_path(self.jsonl), fields, keys=_FIELDS)


class PairDataset(Form):
    """The [data] keys for pairs in a Hugging Face data set or a Parquet file."""

    #: The name on the hub, a folder, or a Parquet file.
    dataset: Filled = Field(examples=["name"])
    #: The split to read.
    split: Filled = Field(examples=["train"])
    #: The configuration, if the data set has several.
    config: Filled | None = None
    #: A branch, a tag or a commit of the hub; default: the newest.
    revision: Filled | None = None
    #: The field of the sources; default: source.
    source_field: Filled | None = None
    #: The field of the targets; default: target.
    target_field: Filled | None = None

    def as_source(self) -> TableSource:
        """Return the source that reads pairs from two fields of the data set."""
        fields = {"source": self.source_field or "source", "target": self.target_field or "target"}
        return Dataset(self.dataset, self.split, fields, self.config, keys=_FIELDS, revision=self.revision)


PAIR_FORMS: Final[tuple[type[Form], ...]] = (FilePair, PairTable, PairLines, PairDataset)
