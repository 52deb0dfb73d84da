"""The data of text classification: texts, or pairs of texts, with labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field

from clearhead.data.sources.examples import ListedExamples
from clearhead.data.sources.labelled import is_delimited
from clearhead.data.sources.run_file_tables import (
    Column,
    Filled,
    Form,
    OptionalColumn,
    has_ending,
    parse_table,
    user_path,
)
from clearhead.data.sources.tables import AlignedFiles, Dataset, DelimitedFile, JsonLinesFile, TableSource
from clearhead.errors import InputError, key
from clearhead.task import LabelKind
from clearhead.tasks.data import PooledSection, TaskData

_RAW: Final = ("labels",)
_KEYS: Final = {"text": "text_column", "labels": "labels", "pair": "pair"}


class ClassifyTask(PooledSection):
    """The [task] table: what the labels are."""

    labels: LabelKind = "single_label"


class LabelledTable(Form):
    """A table or JSON lines, whose columns are chosen; or a text in each line, with files of labels and of pairs."""

    text: Filled = Field(examples=["train.tsv"])
    labels: Column = Field(examples=["label"])
    text_column: OptionalColumn = None
    pair: OptionalColumn = None

    def as_source(self) -> TableSource:
        """Return the source of the columns, fields or files."""
        path = user_path(self.text)
        pair = {} if self.pair is None else {"pair": self.pair}
        if is_delimited(path):
            default = "text" if isinstance(self.labels, str) else None
            columns = {"labels": self.labels, **pair, "text": self.text_column or default}
            separator = "\t" if has_ending(path, ".tsv") else ","
            return DelimitedFile(path, columns, separator, _KEYS, is_distinct=True)
        names = {role: _name(role, column) for role, column in {"labels": self.labels, **pair}.items()}
        if has_ending(path, ".jsonl"):
            return JsonLinesFile(path, {"text": _name("text", self.text_column or "text"), **names}, _RAW, _KEYS)
        if self.text_column is not None:
            raise InputError(
                key("text_column") + f" is for a table, but the text is '{self.text}'; "
                "expected a name that ends in .tsv, .csv or .jsonl"
            )
        return AlignedFiles({"text": path, **{role: user_path(name) for role, name in names.items()}}, "labels")


class LabelledDataset(Form):
    """A Hugging Face dataset by name."""

    dataset: Filled = Field(examples=["name"])
    labels: Filled = Field(examples=["label"])
    split: Filled = "train"
    config: Filled | None = None
    field: Filled | None = None
    pair: Filled | None = None

    def as_source(self) -> TableSource:
        """Return the source of the fields of the dataset."""
        pair = {} if self.pair is None else {"pair": self.pair}
        fields = {"text": self.field or "text", "labels": self.labels, **pair}
        return Dataset(self.dataset, self.split, fields, self.config, _RAW, _KEYS | {"text": "field"})


def _name(role: str, column: int | str) -> str:
    """Return a field or a file, which has no number."""
    if isinstance(column, int):
        raise InputError(key(_KEYS[role]) + f" is {column}; expected a text that is not empty")
    return column


_FORMS: Final[tuple[type[Form], ...]] = (LabelledTable, LabelledDataset)
_EXAMPLES: Final = ListedExamples(
    ({"text": "text", "labels": "label"}, {"text": "text", "pair": "pair", "labels": "label"}), _RAW
)
DATA: Final = TaskData(ClassifyTask, _FORMS, _EXAMPLES)


def parse_labelled_source(table: Mapping[str, Any]) -> TableSource:
    """Turn a table of a run file, such as { text = "t.tsv", labels = "label" }, into a source.

    Args:
        table: "text" and "labels", with "text_column" and "pair" if the text's file is a table or JSON lines; or
            "dataset" and "labels", with "split", "field", "pair" and "config".

    Raises:
        InputError: every unknown or missing key and every wrong type, in one report.
    """
    source: TableSource = parse_table(table, _FORMS).as_source()
    return source
