"""The data of text classification: texts, or pairs of texts, with labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, get_args

from pydantic import Field

from clearhead.data.sources.examples import ListedExamples
from clearhead.data.sources.labelled import is_delimited, labelled_table, read_labelled, text_columns
from clearhead.data.sources.run_file_tables import (
    Column,
    Filled,
    Form,
    OptionalColumn,
    has_ending,
    parse_table,
    user_path,
)
from clearhead.data.sources.tables import AlignedFiles, Dataset, DelimitedFile, JsonLinesFile, Table, TableSource
from clearhead.errors import InputError, key, nearest
from clearhead.tasks.data import LabelledExamples, PooledSection, TaskData
from clearhead.tasks.record import LabelKind

if TYPE_CHECKING:
    from clearhead.data.stores.label_set import LabelSet

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


def _labelled(options: Mapping[str, Any], train: LabelledExamples | None) -> LabelledExamples:
    """As of `TaskData.labelled`; both parts have shares of each class."""
    text_column, pair = options.get("text_column"), options.get("pair")
    table = labelled_table(options["text"], options["labels"], text_column=text_column, pair=pair)
    data = read_labelled(parse_labelled_source(table))
    labels = _labels(data, options, train)
    fields = {role: role for role in ("text", "pair") if role in data} | {"labels": "label"}
    examples = list(zip(*text_columns(data), strict=True))
    described = LabelledExamples(
        table=table,
        what="texts",
        texts=[(" ".join(texts),) for texts in examples],
        keys=list(map(_key, examples)),
        record=lambda row: {name: data[role][row] for role, name in fields.items()},
        facts=f"; {labels.describe(data)}",
        columns={role: name for role, name in fields.items() if role != "text"},
        labels=labels,
        settings={"labels": labels.kind},
    )
    if labels.kind == "single_label":
        return replace(described, groups=data["labels"])
    if labels.kind == "regression":
        # A baseline that counts labels has no use for numbers either.
        return replace(described, unfit=("label_smoothing", "below"))
    return described


def _labels(data: Table, options: Mapping[str, Any], train: LabelledExamples | None) -> LabelSet:
    """Return the labels of training examples; those of validation examples must be among them."""
    # It loads NumPy, for which a fault in a run file should not wait.
    from clearhead.data.stores.label_set import learn_labels

    if train is None:
        return learn_labels(data, _label_kind(data, options.get("label_kind")))
    labels: LabelSet = train.labels
    labels.encode(data)
    return labels


def _key(texts: Sequence[str]) -> list[str]:
    """Return the text of an example, or its two texts as one; none of an empty one."""
    text = "\n".join(texts).strip()
    return [text] if text else []


def _label_kind(data: Table, wanted: str | None) -> LabelKind:
    """Return the kind that is wanted; else tell lists of labels, and numbers that are not classes, from names."""
    kinds: tuple[LabelKind, ...] = get_args(LabelKind)
    for kind in kinds:
        if kind == wanted:
            return kind
    if wanted is not None:
        raise InputError(f"--label-kind is '{wanted}'; expected one of {', '.join(kinds)}{nearest(wanted, kinds)}")
    labels = data["labels"]
    if any(isinstance(label, list | tuple) for label in labels):
        return "multi_label"
    try:
        numbers = [float(label) for label in labels if isinstance(label, str | int | float)]
    except ValueError:
        return "single_label"
    return "regression" if len(numbers) == len(data) and any(number % 1 for number in numbers) else "single_label"


DATA: Final = TaskData(ClassifyTask, _FORMS, _EXAMPLES, labelled=_labelled)


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
